"""Pages of the console are accessible: axe-core has no finding, narrow and wide, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from control import access
from control.clock import now_ms
from control.records.api_reports import EndedRequest, note
from control.redis.connection import run_every
from tests.acceptance.console.browser import scrolls_sideways
from tests.acceptance.console.conftest import WAIT_MS
from tests.acceptance.console.scripted_farm import ScriptedFarm, trouble
from tests.acceptance.console.test_chat_text import ANSWER
from tests.integration.api.conftest import ApiProcess
from tests.programs import absent

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).parents[3] / "node_modules" / "axe-core" / "axe.min.js"
PAGES = [
    "#/",
    "#/models/org%2Flarge-instruct",
    "#/models/tiny",
    "#/hosts/alpha",
    "#/requests",
    "#/requests/none",
    "#/dead",
    "#/keys",
    "#/history",
    "#/chat?model=tiny",
    "#/usage",
    "#/nowhere",
]


@pytest.fixture(scope="module")
def axe() -> str:
    if not SCRIPT.exists():
        absent("axe-core", "axe-core is not installed: npm install --no-save axe-core@4")
    return SCRIPT.read_text()


@pytest.fixture(scope="module")
def troubled(scripted: ScriptedFarm) -> Iterator[ScriptedFarm]:
    """A farm with findings of each kind, keys and ended requests."""
    trouble(scripted)
    access.create(scripted.client, access.mint(name="hers", rpm=60)[0])
    failed = EndedRequest(id="bad", path="/v1/x", status=500, ended_ms=now_ms(), total_ms=5, model="tiny", error="why")
    run_every(scripted.client, note([failed]))
    scripted.leader.reply = lambda prompt: ANSWER
    yield scripted


def findings(page: Page, axe: str) -> list[str]:
    page.evaluate(axe)
    outcome: Any = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [f"{one['id']}: {[node['html'][:200] for node in one['nodes']]}" for one in outcome["violations"]]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_no_page_has_a_finding(
    browser: Browser, console_api: ApiProcess, troubled: ScriptedFarm, axe: str, width: int, dark: bool
) -> None:
    """With a conversation in the chat, and a dialog and its folded settings on the farm's page."""
    found: dict[str, list[str]] = {}
    context = browser.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        bypass_csp=True,  # the script of axe-core is none of the console's files
    )
    context.set_default_timeout(WAIT_MS)
    try:
        for address in PAGES:
            page = context.new_page()
            page.goto(f"{console_api.url}/console/{address}")
            page.wait_for_selector("main h1")
            page.get_by_text("Reading the").first.wait_for(state="detached")
            if address == "#/":
                page.get_by_role("table", name="Hosts").wait_for()
            if address.startswith("#/chat"):
                page.get_by_label("Message", exact=True).fill("x")
                page.get_by_label("Message", exact=True).press("Enter")
                page.get_by_text("first after").wait_for()
            found[address] = findings(page, axe)
            assert not scrolls_sideways(page), address
            if address == "#/":
                page.get_by_role("button", name="Load a model").click()
                page.get_by_text("More settings").click()
                found["dialog"] = findings(page, axe)
            page.close()
    finally:
        context.close()
    assert {address: some for address, some in found.items() if some} == {}


def test_a_finding_is_found(browser: Browser, console_api: ApiProcess, troubled: ScriptedFarm, axe: str) -> None:
    """The control: a button without a name and a text without contrast."""
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    page.goto(f"{console_api.url}/console/#/keys")
    page.wait_for_selector("main h1")
    page.get_by_text("Reading the").first.wait_for(state="detached")
    # Beside what the console draws again when its data comes.
    page.evaluate("document.body.append(document.createElement('button'))")
    page.evaluate("document.querySelector('.brand').style.color = '#ddd'")
    rules = {one.partition(":")[0] for one in findings(page, axe)}
    context.close()
    assert {"button-name", "color-contrast"} <= rules
