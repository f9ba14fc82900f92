"""The sections of pages that are generated from the code. `python -m tests.pages` (`make pages`) writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import detectors, rooms
from tests.rooms import ROOT


@dataclass(frozen=True)
class Section:
    """The text between two marks of a page."""

    name: str
    page: Path
    text: Callable[[], str]

    @property
    def marks(self) -> tuple[str, str]:
        return f"<!-- {self.name}: make pages -->\n", f"<!-- /{self.name} -->\n"

    def parts(self) -> tuple[str, str, str]:
        """The page before the section, the section, and the page after it, without the marks."""
        begin, end = self.marks
        before, found, rest = self.page.read_text().partition(begin)
        text, ended, after = rest.partition(end)
        assert found and ended, f"{self.page} has no section {begin!r} … {end!r}"
        return before, text, after

    def write(self) -> None:
        begin, end = self.marks
        before, _, after = self.parts()
        self.page.write_text(before + begin + self.text() + end + after)


SECTIONS = [
    Section("rooms", ROOT / "docs/architecture.md", rooms.page_map),
    Section("detectors", ROOT / "docs/reliability.md", detectors.table),
]


if __name__ == "__main__":
    for section in SECTIONS:
        section.write()
