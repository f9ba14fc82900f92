"""The console's chat survives a reload of the tab: its messages, and an answer under way; and what is not stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from control import access
from control.keys import ModelKeys
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm
from tests.acceptance.console.test_chat_page import said, say
from tests.integration.api.conftest import running_api
from tests.leader import ScriptedLeader
from tests.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.timeout(180)

CHAT = "#/chat?model=tiny"
LONG = "a sentence of many letters, so that there is a middle of it"
ANSWERED = "first after"


@pytest.fixture
def leader(scripted: ScriptedFarm) -> Iterator[ScriptedLeader]:
    scripted.leader.reset()
    yield scripted.leader
    scripted.leader.reset()


def stored(page: Page) -> str:
    """Everything that the browser keeps for the page, in this tab and beyond."""
    return page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")


def test_a_reload_in_mid_answer_goes_on_to_the_same_text(visit: Visit, leader: ScriptedLeader) -> None:
    """The first answer stays, the second one goes on under its request; the draft is there; a new chat removes all."""
    page = visit(CHAT)
    page.get_by_text("Try a model.").wait_for()
    say(page, "before")
    page.get_by_text(ANSWERED).wait_for()
    leader.pause()
    say(page, LONG)
    until(lambda: len(leader.claimed) == 2, 20)
    leader.step(12)
    page.locator(".turn.assistant .said").nth(1).get_by_text("you said").wait_for()
    page.get_by_label("Message", exact=True).fill("a draft")
    page.reload()
    page.get_by_text("you said before").wait_for()
    assert page.get_by_label("Message", exact=True).input_value() == "a draft"
    leader.resume()
    page.get_by_text("resumed once").wait_for()
    assert said(page) == f"you said {LONG}" and len(leader.claimed) == 2
    page.reload()  # all of it has ended
    page.get_by_text("resumed once").wait_for()
    assert [said(page), page.locator(".turn").count()] == [f"you said {LONG}", 4]
    assert page.evaluate("localStorage.length") == 0 and page.context.cookies() == []
    say(page, "after")
    until(lambda: said(page) == "you said after", 20)
    assert LONG in leader.prompt() and "before" in leader.prompt()
    page.get_by_role("button", name="New chat").click()
    assert "before" not in stored(page)
    page.reload()
    page.get_by_text("Try a model.").wait_for()


def test_a_reload_before_the_first_headers_joins_the_request(visit: Visit, leader: ScriptedLeader) -> None:
    """Its id is not known then: the same bytes are sent again under its key, and are computed once."""
    page = visit(CHAT)
    page.get_by_text("Try a model.").wait_for()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Most tokens").fill("400")
    leader.claiming = False
    say(page, LONG)
    until(lambda: leader.client.hget(ModelKeys("tiny").load, "queued") == "1", 20)
    page.reload()
    page.get_by_text("Waiting in the queue: place 1.").wait_for()
    leader.claiming = True
    until(lambda: said(page) == f"you said {LONG}", 20)
    assert len(leader.claimed) == 1


RECORDS = """async () => {
  const { Answer } = await import(new URL("lib/answer.js", location));
  const event = (id, data) => `id: ${id}\\ndata: ${JSON.stringify(data)}\\n\\n`;
  const piece = (text, id) => event(id, { choices: [{ delta: { content: text } }] });
  const fault = event("r:3", { error: { message: "m", code: "stream_interrupted" } });
  const streams = [piece("a", "r:1") + piece("b", "r:2") + fault, piece("c", "r:3") + "data: [DONE]\\n\\n"];
  const [fetched, resumed, saved] = [window.fetch, [], []];
  window.fetch = async (url, sent) => {
    if (!/chat.completions|requests.r.events/.test(url)) return fetched(url, sent);
    resumed.push(sent.headers.get("last-event-id"));
    return new Response(streams.shift(), { headers: { "x-request-id": "r" } });
  };
  const answer = new Answer({ model: "tiny", messages: [] }, () => {
    const { text, last } = answer.record();
    saved.push([text, last]);
  });
  await answer.run();
  return [resumed, saved];
}"""


def test_each_saved_state_goes_on_behind_its_text(visit: Visit, leader: ScriptedLeader) -> None:
    """A tab that crashes has no last save: none of the others may bring a piece twice, nor skip one after a fault."""
    page = visit(CHAT)
    page.get_by_text("Try a model.").wait_for()
    resumed, saved = page.evaluate(RECORDS)
    assert resumed == [None, "r:2"]
    assert all([text, last] in (["", None], ["a", "r:1"], ["ab", "r:2"], ["abc", "r:3"]) for text, last in saved)
    assert saved[-1] == ["abc", "r:3"]


def test_the_place_in_the_queue_is_shown_until_the_claim(visit: Visit, leader: ScriptedLeader) -> None:
    """With the expected wait where the farm can tell it."""
    page = visit(CHAT)
    page.get_by_text("Try a model.").wait_for()
    leader.claiming = False
    load = ModelKeys("tiny").load
    page.evaluate(ASK_BESIDE)
    until(lambda: leader.client.hget(load, "queued") == "1", 20)
    leader.client.hset(load, mapping={"busy_ms": 300_000, "busy_ends": 9, "busy_since": 1})
    say(page, "queued")
    status = page.locator(".turn.assistant .figures")
    status.get_by_text("Waiting in the queue: place 2, about ").wait_for()
    leader.pause()
    leader.claiming = True
    status.get_by_text("Waiting for the first token…").wait_for()
    leader.resume()
    until(lambda: said(page) == "you said queued", 20)


ASK_BESIDE = """() => void fetch("../v1/chat/completions", {
  method: "POST", headers: {"content-type": "application/json"},
  body: JSON.stringify({model: "tiny", messages: [{role: "user", content: "beside"}]})})"""

ASKED = {"model": "tiny", "messages": []}
ANSWER = {
    "asked": ASKED,
    "text": "kept",
    "reasoning": "",
    "state": "ended",
    "finish": "stop",
    "usage": None,
    "error": None,
    "rid": "r1",
    "resumed": 0,
    "began": 1,
    "last": None,
    "key": "console-1",
    "firstAt": 0,
    "lastAt": 0,
}


def kept(*turns: Any, **settings: Any) -> str:
    empty = {"model": "tiny", "system": "", "temperature": "", "most": "", "draft": ""}
    return json.dumps({"settings": empty | settings, "turns": turns})


def answered(**fields: Any) -> str:
    return kept({"role": "user", "text": "x"}, {"role": "assistant", "answer": ANSWER | fields})


HOSTILE = {
    "no JSON": "{",
    "a list": "[]",
    "turns of another kind": kept("x", None),
    "a turn without a text": kept({"role": "user", "text": {"toString": "x"}}),
    "another role": kept({"role": "system", "text": "x"}),
    "a setting that is no text": kept({"role": "user", "text": "x"}, model={}),
    "an id that leads elsewhere": answered(state="answering", rid="../../farm/models/unload?"),
    "a mark that splits the headers": answered(state="answering", last="r1:1.1\r\nx: y"),
    "a key that splits the headers": answered(state="waiting", rid=None, key="console-1\r\nx: y"),
    "a count that is none": answered(usage={"completion_tokens": "<b>"}),
    "an unknown state": answered(state="constructor"),
    "an answer that is not the last": json.dumps(
        {**json.loads(kept()), "turns": [{"role": "assistant", "answer": {**ANSWER, "state": "answering"}}] * 2}
    ),
}


KEPT = """async (texts) => {
  const { kept } = await import(new URL("lib/conversation.js", location));
  return texts.map((text) => {
    sessionStorage["furrow.chat"] = text;
    return kept(() => {}) !== null && "furrow.chat" in sessionStorage;
  });
}"""


def test_hostile_contents_are_dropped_and_markup_is_text(visit: Visit, leader: ScriptedLeader) -> None:
    """Whatever another program wrote into the tab's storage: the page sends nothing of it, and takes a message."""
    markup = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    page = visit(CHAT)
    page.get_by_text("Try a model.").wait_for()
    assert page.evaluate(KEPT, [answered()]) == [True], "the control"
    assert page.evaluate(KEPT, list(HOSTILE.values())) == [False] * len(HOSTILE)
    # After the page that goes has saved its own.
    page.add_init_script("if (window.name) { sessionStorage['furrow.chat'] = window.name; window.name = ''; }")

    def open_with(text: str) -> None:
        page.evaluate("text => (window.name = text)", text)
        page.reload()

    open_with(HOSTILE["an id that leads elsewhere"])
    page.get_by_text("Try a model.").wait_for()
    open_with(kept(*({"role": "user", "text": "z" * 300_000} for _ in range(6))))
    page.reload()  # which saves no more than the bound
    page.locator(".turn").first.wait_for()
    assert page.locator(".turn").count() == 3
    open_with(answered(text=markup, asked={"model": markup, "messages": []}, error=markup, state="failed"))
    page.locator(".turn .said").get_by_text("onerror").wait_for()
    assert "owned" not in page.title() and page.locator("main img, main script").count() == 0
    say(page, "still")
    until(lambda: said(page) == "you said still", 20)


FULL = """(() => {
  const set = Storage.prototype.setItem;
  Storage.prototype.setItem = function (name, text) {
    if (text.length > 1200) throw new DOMException("full", "QuotaExceededError");
    return set.call(this, name, text);
  };
})()"""
DISABLED = """for (const name of ["sessionStorage", "localStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });"""


@pytest.mark.parametrize("state", ["full", "disabled"])
def test_what_a_reload_does_not_keep_is_said(visit: Visit, leader: ScriptedLeader, state: str) -> None:
    """With a full storage the last messages are kept, without one none; the chat goes on."""
    page = visit(CHAT)
    page.add_init_script({"full": FULL, "disabled": DISABLED}[state])
    page.reload()
    page.get_by_text("Try a model.").wait_for()
    for index in range(3):
        say(page, f"{index} {LONG}")
        until(lambda index=index: page.get_by_text(ANSWERED).count() == index + 1, 20)
    full = state == "full"
    page.get_by_text(
        "A reload keeps only the last 2 of these 6 messages." if full else "A reload drops this"
    ).wait_for()
    page.reload()
    page.get_by_text(f"you said 2 {LONG}" if full else "Try a model.").wait_for()
    assert page.locator(".turn").count() == (2 if full else 0)


def test_another_key_does_not_see_the_chat(
    visit: Visit, leader: ScriptedLeader, scripted: ScriptedFarm, tmp_path: Path
) -> None:
    """A revoked key is replaced in the same tab; a key that is forgotten takes the chat with it."""
    made = [access.mint(admin=True) for _ in range(2)]
    for key, _ in made:
        access.create(scripted.client, key)
    (first, secret), (_, other) = made

    def enter(text: str) -> None:
        page.get_by_label("API key").fill(text)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Chat").wait_for()

    with running_api(scripted.server.url, tmp_path, "--keys") as process:
        page = visit(CHAT, url=process.url, expected=("401",))
        enter(secret)
        page.get_by_text("Try a model.").wait_for()
        say(page, "mine alone")
        page.get_by_text("you said mine alone").wait_for()
        access.revoke(scripted.client, first)
        page.get_by_role("heading", name="This farm asks for a key").wait_for()
        enter(other)
        page.get_by_text("Try a model.").wait_for()
        assert "mine alone" not in stored(page) + page.content()
        say(page, "the other's")
        page.get_by_text("you said the other's").wait_for()
        page.get_by_role("button", name="Forget key").click()
        page.get_by_role("heading", name="This farm asks for a key").wait_for()
        assert "the other's" not in stored(page) + page.content()
        enter(other)
        page.get_by_text("Try a model.").wait_for()
        page.close()
