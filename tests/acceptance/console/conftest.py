"""One scripted farm, one API process and one browser for the tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.acceptance.console.browser import Watch, chromium
from tests.acceptance.console.scripted_farm import ScriptedFarm, populate
from tests.integration.api.conftest import ApiProcess, running_api
from tests.servers import NEW, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Of a module, not of the run: while Playwright runs, no other test of this process could run an event loop.
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def scripted(browser: Browser) -> Iterator[ScriptedFarm]:
    """After `browser`, so that nothing starts where there is none."""
    with serving(NEW, "appendonly yes") as server:
        farm = ScriptedFarm(server)
        populate(farm)
        farm.start()
        yield farm
        farm.stop()


@pytest.fixture(scope="module")
def console_api(scripted: ScriptedFarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with running_api(scripted.server.url, tmp_path_factory.mktemp("console")) as process:
        yield process


Visit = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser, console_api: ApiProcess) -> Iterator[Visit]:
    """Opens a page of the console in a context of its own: `visit("#/models/tiny", width=390)`. `url` is another API
    process's, `expected` texts of errors that the test brings about. At the end every page must be without others."""
    contexts, watches = [], []

    def open_page(
        address: str = "#/", *, width: int = 1280, dark: bool = False, url: str = "", expected: tuple[str, ...] = ()
    ) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(WAIT_MS)
        page, origin = context.new_page(), url or console_api.url
        watch = Watch(page, origin)
        watch.expected = expected
        contexts.append(context)
        watches.append(watch)
        page.goto(f"{origin}/console/{address}")
        page.wait_for_selector("main h1")
        return page

    yield open_page
    for context in contexts:
        context.close()
    for watch in watches:
        watch.check()
