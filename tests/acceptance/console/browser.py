"""Debian's Chromium, driven by Playwright; every page is watched for errors and for foreign requests."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.programs import absent

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]


def missing() -> str | None:
    """The reason why no browser can be driven here; None if one can."""
    if find_spec("playwright") is None:
        return "Playwright is not installed: pip install playwright"
    if _path() is None:
        return "Chromium is not installed: apt-get install chromium"
    return None


def _path() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Generator[Browser]:
    """A browser without a window. Skips the test where there is none, with the reason; in CI that fails."""
    if reason := missing():
        absent("chromium", reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_path(), args=_FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Watch:
    """Errors that a page logged and requests that left its origin."""

    def __init__(self, page: Page, origin: str) -> None:
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.expected: tuple[str, ...] = ()
        """Texts of errors that a test brings about, such as an answer of 401."""
        self._host = urlsplit(origin).netloc
        page.on("console", self._logged)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._requested)

    def _logged(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")

    def _requested(self, request: Any) -> None:
        if urlsplit(request.url).netloc != self._host:
            self.foreign.append(request.url)

    def check(self) -> None:
        """Raises AssertionError for an error that was not expected, or a foreign request."""
        assert self.foreign == []
        unexpected = [one for one in self.errors if not any(text in one for text in self.expected)]
        assert not unexpected, unexpected


def scrolls_sideways(page: Page) -> bool:
    """True if the page is wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")
