"""The console's chat and its page of keys work in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from control import access
from tests.acceptance.console.browser import scrolls_sideways
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm
from tests.integration.api.conftest import ApiProcess
from tests.leader import ScriptedLeader
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

pytestmark = pytest.mark.timeout(180)

HOSTILE = "<script>document.title='owned'</script> \u202eשלום"


@pytest.fixture
def leader(scripted: ScriptedFarm) -> Iterator[ScriptedLeader]:
    scripted.leader.reset()
    yield scripted.leader
    scripted.leader.reset()


def say(page: Page, text: str) -> None:
    message = page.get_by_label("Message", exact=True)
    message.fill(text)
    message.press("Enter")


def said(page: Page) -> str:
    """The text of the last answer."""
    return page.locator(".turn.assistant .said").last.inner_text()


def test_a_conversation_with_settings(visit: Visit, leader: ScriptedLeader) -> None:
    """An answer is text, whatever it holds; settings reach the model; figures stand below the answer."""
    page = visit("#/chat?model=tiny", width=390, expected=("400",))
    page.get_by_text("Try a model.").wait_for()
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("400")
    say(page, HOSTILE)
    page.get_by_text("first after").wait_for()
    assert said(page) == f"you said {HOSTILE}"
    claimed = leader.claimed[-1].params
    assert "Be brief." in leader.prompt() and claimed.sampling.temperature == 0 and claimed.sampling.max_tokens == 400
    say(page, "and now")
    until(
        lambda: said(page) == "you said and now" and page.get_by_text("first after").count() == 2, 20
    )  # no rate, if it came in one piece
    assert HOSTILE in leader.prompt()  # the turn before
    page.get_by_role("link", name="Request").last.click()
    page.get_by_role("heading", name="Timeline").wait_for()
    page.go_back()
    page.get_by_text("you said and now").wait_for()
    assert not scrolls_sideways(page)
    page.get_by_role("button", name="New chat").click()
    page.get_by_text("Try a model.").wait_for()
    say(page, "x" * 10_000)  # more than the context
    page.get_by_text("maximum context length").wait_for()
    assert not scrolls_sideways(page)


def test_an_answer_goes_on_after_the_death_of_the_api(
    visit: Visit, leader: ScriptedLeader, console_api: ApiProcess
) -> None:
    """The same text as without it, under the same request."""
    expected = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")
    page = visit("#/chat?model=tiny", expected=expected)
    text = "a sentence of many letters, so that there is a middle of it"
    page.get_by_text("Try a model.").wait_for()
    leader.pause()
    say(page, text)
    until(lambda: leader.claimed, 20)
    leader.step(12)
    page.get_by_text("you said").last.wait_for()
    console_api.kill()
    leader.step(12)
    page.get_by_text("The connection broke.").wait_for()
    console_api.start()
    leader.resume()
    page.get_by_text("resumed once").wait_for()
    assert said(page) == f"you said {text}"
    assert len(leader.claimed) == 1


def test_a_silent_connection_is_given_up(visit: Visit, leader: ScriptedLeader) -> None:
    """A request that gets no answer ends in time and its poll goes on; a stream without a byte is opened again."""
    page = visit("#/chat?model=tiny")
    page.add_init_script(IMPATIENT)
    hung: list[Route] = []
    page.route("**/v1/models", lambda route: hung.append(route), times=1)
    page.reload()
    page.get_by_role("alert").filter(has_text="has not answered for 15 s").wait_for()
    page.get_by_text("Try a model.").wait_for()
    leader.pause()
    with page.expect_request("**/v1/requests/*/events"):
        say(page, "so silent")
        until(lambda: leader.claimed, 20)
        leader.step(12)
    leader.resume()
    page.get_by_text("resumed").wait_for()
    assert said(page) == "you said so silent" and len(leader.claimed) == 1 and len(hung) == 1


IMPATIENT = """
const [timeout, timer] = [AbortSignal.timeout, setTimeout];
AbortSignal.timeout = (ms) => timeout.call(AbortSignal, ms === 15000 ? 2000 : ms);
window.setTimeout = (act, ms, ...rest) => timer(act, { 25000: 2000, 5000: 500 }[ms] ?? ms, ...rest);
"""


def test_a_choice_stays_while_the_model_is_away(visit: Visit, leader: ScriptedLeader) -> None:
    """It can't be asked meanwhile; the end of a running answer is asked about, and is not told without an answer."""
    page = visit("#/chat?model=tiny")
    page.add_init_script(IMPATIENT)
    page.reload()
    page.get_by_text("Try a model.").wait_for()
    other = {"id": "another", "object": "model"}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [other]}))
    page.get_by_text("can't be asked now").wait_for()
    assert page.get_by_role("button", name="Send").is_disabled()
    say(page, "dropped")
    page.unroute("**/v1/models")
    page.get_by_text("can't be asked now").wait_for(state="detached")
    assert page.get_by_label("Model", exact=True).input_value() == "tiny"
    leader.pause()
    say(page, "never answered")
    until(lambda: leader.claimed, 20)
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped.").wait_for()
    leader.resume()
    say(page, "now")
    until(lambda: said(page) == "you said now", 20)
    assert "never answered" not in leader.prompt() and "dropped" not in leader.prompt()


def test_stop_cancels_the_request(visit: Visit, leader: ScriptedLeader, scripted: ScriptedFarm) -> None:
    """By the keyboard alone; what was said stays."""
    page = visit("#/chat?model=tiny")
    page.get_by_text("Try a model.").wait_for()
    leader.pause()
    say(page, "for ever")
    until(lambda: leader.claimed, 20)
    leader.step(9)
    page.get_by_text("you said").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_text("Stopped.").wait_for()
    # The leader stays paused until the cancel is there: else it could finish the answer before the API process has
    # seen that the browser left.
    key = f"furrow:{{tiny}}:req:{leader.claimed[0].rid}"
    until(lambda: scripted.client.hget(key, "state") == "cancelled", 20)
    assert said(page).startswith("you said")


def test_a_key_is_made_limited_and_revoked(visit: Visit, scripted: ScriptedFarm, console_api: ApiProcess) -> None:
    """The secret is shown once; limits are changed and removed; the end of a key asks first."""
    name = "<script>document.title='owned'</script> שלום"
    page = visit("#/keys", width=390)
    page.get_by_text("No API key was made.").wait_for()
    page.get_by_role("button", name="Create key").click()
    form = page.get_by_role("dialog")
    form.get_by_label("Name").fill(name)
    form.get_by_text("More settings").click()
    form.get_by_label("Requests per minute").fill("60")
    form.get_by_label("Tokens per minute").fill("-1")
    form.get_by_text("More settings").click()
    form.get_by_role("button", name="Create").click()
    form.get_by_label("Tokens per minute").fill("")  # unfolded, as it was not valid
    held: list[Route] = []
    page.route("**/farm/keys", lambda route: held.append(route), times=1)
    with page.expect_request("**/farm/keys"):
        form.get_by_role("button", name="Create").click()
    for _ in range(3):
        page.keyboard.press("Escape")
    assert form.get_by_role("button", name="Cancel").is_disabled()
    held[0].continue_()
    secret = page.get_by_label("Secret").input_value()
    for _ in range(3):
        page.keyboard.press("Escape")
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Done").click()
    page.get_by_text("60 requests per minute").wait_for()
    assert secret not in page.content() and not scrolls_sideways(page)
    answer = httpx.post(
        f"{console_api.url}/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "x"}]},
        headers={"authorization": f"Bearer {secret}"},
        timeout=40,
    )
    assert answer.status_code == 200
    [(key, _)] = access.list_keys(scripted.client)
    page.get_by_role("link", name=f"Usage of {name}").click()
    page.get_by_role("table", name="Usage").get_by_text("tiny").wait_for()
    page.get_by_role("button", name=f"Limits of {name}").click()
    form.get_by_label("Requests per minute").fill("")
    form.get_by_label("Tokens per minute").fill("-1")
    form.get_by_role("button", name="Change").click()
    form.get_by_label("Tokens per minute").fill("5000")
    form.get_by_role("button", name="Change").click()
    page.get_by_text("5,000 tokens per minute").wait_for()
    changed = access.find(scripted.client, key.id)
    assert (changed.rpm, changed.tpm) == (0, 5_000)
    page.get_by_role("button", name=f"Revoke {name}").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    page.get_by_text("revoked").wait_for()
    assert access.find(scripted.client, key.id).revoked > 0
