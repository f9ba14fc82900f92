"""Pictures of every page, in light, dark and narrow: `python -m tests.acceptance.console.shots FOLDER [TEXT…]`.

With TEXT only pages are taken whose name contains one. Each picture is of a scripted farm.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.acceptance.console.browser import chromium
from tests.acceptance.console.scripted_farm import ScriptedFarm, populate, trouble
from tests.acceptance.console.worked_farm import BURIED, LIVED, WORKED, talk, use, worked
from tests.integration.api.conftest import ApiProcess, running_api
from tests.servers import NEW, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FORMS = {"light": (1280, False), "dark": (1280, True), "390": (390, False), "390-dark": (390, True)}
SETTLED_S = 2.5
TOGETHER = 4
"""Pages of one context: each holds a connection, and a browser has six for one server."""


def press(name: str) -> Callable[[Page], None]:
    """Presses the first button of that name."""
    return lambda page: page.get_by_role("button", name=name).first.click()


def nothing(_: Page) -> None:
    """The page as it is."""


QUIET: dict[str, tuple[str, Callable[[Page], None]]] = {
    "farm": ("#/", nothing),
    "requests": ("#/requests", nothing),
    "dead": ("#/dead", nothing),
    "keys": ("#/keys", nothing),
    "history": ("#/history?model=tiny", nothing),
    "chat": ("#/chat?model=tiny", nothing),
    "lost": ("#/nowhere", nothing),
    "model-unknown": ("#/models/none", nothing),
}
TROUBLED: dict[str, tuple[str, Callable[[Page], None]]] = {
    "farm-trouble": ("#/", nothing),
    "model": ("#/models/org%2Flarge-instruct", nothing),
    "model-slow": ("#/models/slow-8b", nothing),
    "model-failed": ("#/models/org%2Ftoo-large", nothing),
    "model-loading": ("#/models/org%2Fnew-70b", nothing),
    "model-unload": ("#/models/org%2Flarge-instruct", press("Unload…")),
    "model-settings": ("#/models/slow-8b", press("Change settings…")),
    "load": ("#/", press("Load a model…")),
    "host": ("#/hosts/alpha", nothing),
    "host-away": ("#/hosts/gamma", nothing),
}
WORK: dict[str, tuple[str, Callable[[Page], None]]] = {
    "work-requests": ("#/requests", nothing),
    "work-life": (f"#/requests/{LIVED}", nothing),
    "work-dead": ("#/dead", nothing),
    "work-letter": (f"#/dead/{WORKED.replace('/', '%2F')}/{BURIED[0]}", press("Show prompt")),
    "work-keys": ("#/keys", nothing),
    "work-key-limits": ("#/keys", press("Limits of batch jobs")),
    "work-history": (f"#/history?model={WORKED.replace('/', '%2F')}", nothing),
    "work-chat": ("#/chat?model=tiny", talk),
}


@contextmanager
def served(folder: Path, fill: Callable[[ScriptedFarm], None]) -> Generator[tuple[ScriptedFarm, ApiProcess]]:
    with serving(NEW, "appendonly yes") as server:
        farm = ScriptedFarm(server)
        fill(farm)
        farm.start()
        with running_api(server.url, folder) as process:
            yield farm, process
        farm.stop()


def take(
    browser: Browser, url: str, folder: Path, pages: dict[str, tuple[str, Callable[[Page], None]]], wanted: list[str]
) -> None:
    """A picture of each page in each form."""
    chosen = [one for one in pages.items() if not wanted or any(text in one[0] for text in wanted)]
    for form, (width, dark) in FORMS.items():
        for at in range(0, len(chosen), TOGETHER):
            context = browser.new_context(
                viewport={"width": width, "height": 800},
                color_scheme="dark" if dark else "light",
                reduced_motion="reduce",
            )
            opened = [(name, act, context.new_page(), address) for name, (address, act) in chosen[at : at + TOGETHER]]
            for _, _, page, address in opened:
                page.goto(f"{url}/console/{address}")
                page.wait_for_selector("main h1")
            time.sleep(SETTLED_S)
            for name, act, page, _ in opened:
                page.bring_to_front()
                act(page)
                page.screenshot(path=str(folder / f"{name}-{form}.png"), full_page=True)
            context.close()


def main(folder: Path, wanted: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)

    def troubled(farm: ScriptedFarm) -> None:
        populate(farm)
        trouble(farm)

    with chromium() as browser, tempfile.TemporaryDirectory() as logs:
        for fill, pages in ((populate, QUIET), (troubled, TROUBLED), (worked, WORK)):
            with served(Path(logs), fill) as (farm, process):
                if fill is worked:
                    use(farm, process.url)
                take(browser, process.url, folder, pages, wanted)
        take_special(browser, folder, Path(logs), wanted)


def take_special(browser: Browser, folder: Path, logs: Path, wanted: list[str]) -> None:
    """A farm without anything, one whose Redis is away, and one that asks for a key."""
    with serving(NEW, "appendonly yes") as server:
        with running_api(server.url, logs) as process:
            take(browser, process.url, folder, {"farm-empty": ("#/", nothing)}, wanted)

            def away(page: Page) -> None:
                server.kill()
                page.get_by_text("Redis does not answer").wait_for()

            def back(_: Page) -> None:
                if server.process is None:
                    server.start()
                away(_)

            take(browser, process.url, folder, {"farm-away": ("#/", back)}, wanted)
            if server.process is None:
                server.start()
        with running_api(server.url, logs, "--keys") as process:
            take(browser, process.url, folder, {"key": ("#/", nothing)}, wanted)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
