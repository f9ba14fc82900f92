"""The console recovers from outages of Redis and API: without a reload; and where a key is needed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from control import access
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm
from tests.integration.api.conftest import running_api
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)


def test_redis_away_is_said_and_the_page_recovers(visit: Visit, scripted: ScriptedFarm) -> None:
    """Above the last known state, without a reload; an act meanwhile says why it failed."""
    page = visit(expected=("503",))
    row = page.get_by_role("table", name="Models").get_by_role("row").filter(has_text="org/large-instruct")
    row.wait_for()
    page.evaluate("document.body.dataset.kept = 'yes'")
    scripted.server.kill()
    banner = page.get_by_role("status").filter(has_text="Redis does not answer")
    banner.wait_for()
    assert "shows the state of" in banner.inner_text() and row.is_visible()
    assert page.get_by_text("All is well").count() == 0
    page.get_by_role("button", name="Drain beta").click()
    page.get_by_role("button", name="Drain host").click()
    page.get_by_role("alert").filter(has_text="Redis").wait_for()
    scripted.server.start()
    banner.wait_for(state="detached")
    page.get_by_text("live", exact=True).wait_for()
    row.get_by_text("loaded").wait_for()
    assert page.evaluate("document.body.dataset.kept") == "yes"


def test_an_api_process_that_dies_or_hangs_is_said(visit: Visit, scripted: ScriptedFarm, tmp_path: Path) -> None:
    """Its end at once, a stop within seconds; the page goes on with the next process at the address."""
    with running_api(scripted.server.url, tmp_path) as process:
        page = visit(url=process.url, expected=("ERR_", "Failed to load resource"))
        page.get_by_text("live", exact=True).wait_for()
        process.process.send_signal(signal.SIGSTOP)
        page.get_by_text("No news from the farm.").wait_for()
        process.process.send_signal(signal.SIGCONT)
        page.get_by_text("live", exact=True).wait_for()
        process.process.kill()
        process.process.wait()
        page.get_by_text("The API process does not answer.").wait_for()
        with running_api(scripted.server.url, tmp_path, port=process.port):
            page.get_by_text("live", exact=True).wait_for()


def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(
    visit: Visit, scripted: ScriptedFarm, tmp_path: Path
) -> None:
    """A wrong key is refused with the reason; no cookie is set, no address has the key."""
    key, operator = access.mint(admin=True)
    access.create(scripted.client, key)
    with running_api(scripted.server.url, tmp_path, "--keys") as process:
        page = visit("#/hosts/alpha", url=process.url, expected=("401",))
        page.get_by_role("heading", name="This farm asks for a key").wait_for()
        page.get_by_label("API key").fill("sk-wrong")
        page.keyboard.press("Enter")
        page.get_by_role("alert").filter(has_text="The API key is wrong").wait_for()
        page.get_by_label("API key").fill(operator)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="alpha").wait_for()
        page.reload()
        page.get_by_role("table", name="Ranks").wait_for()
        assert page.context.cookies() == [] and operator not in page.url
        assert page.evaluate("localStorage.length") == 0
        other = page.context.new_page()
        other.goto(f"{process.url}/console/")
        other.get_by_role("heading", name="This farm asks for a key").wait_for()
        page.get_by_role("button", name="Forget key").click()
        page.get_by_role("heading", name="This farm asks for a key").wait_for()
        until(lambda: page.evaluate("sessionStorage.length") == 0)


def test_an_ordinary_key_opens_the_chat_and_its_own_usage(visit: Visit, scripted: ScriptedFarm, tmp_path: Path) -> None:
    """And nothing else: other addresses lead to the chat, and no request of an operator's route is answered."""
    key, secret = access.mint(name="mine")
    access.create(scripted.client, key)
    with running_api(scripted.server.url, tmp_path, "--keys") as process:
        page = visit("#/keys", url=process.url, expected=("401", "403"))
        page.get_by_label("API key").fill(secret)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Chat").wait_for()
        links = page.get_by_role("navigation", name="Pages").get_by_role("link")
        assert links.all_inner_texts() == ["Chat", "Usage"]
        page.get_by_label("Model", exact=True).select_option("tiny")
        page.get_by_label("Message", exact=True).fill("hello")
        page.get_by_label("Message", exact=True).press("Enter")
        page.get_by_text("you said hello").wait_for()
        assert page.get_by_role("link", name="Request").count() == 0
        for address in (
            "#/",
            "#/keys",
            "#/requests",
            "#/hosts/alpha",
            "#/models/tiny",
            "#/dead",
            "#/history",
            "#/none",
        ):
            page.goto(f"{process.url}/console/{address}")
            page.get_by_role("heading", name="Chat").wait_for()
            until(lambda: "#/chat" in page.url, 20)
        links.get_by_text("Usage").click()
        page.get_by_role("table", name="Usage").get_by_text("tiny").wait_for()
        assert "mine" not in page.locator("main").inner_text() and key.id not in page.content()
        page.reload()
        page.get_by_role("table", name="Usage").wait_for()
        access.revoke(scripted.client, key)
        page.get_by_role("heading", name="This farm asks for a key").wait_for()
