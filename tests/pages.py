"""The sections of pages, and the files, that are generated from the code. `python -m tests.pages` (`make pages`) writes
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import coverage_page, detectors, engines_page, families, forms_page, rooms
from tests.rooms import ROOT
from worker.families.family import DEFAULTS_FILE


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
        before, mark, rest = self.page.read_text().partition(begin)
        text, ended, after = rest.partition(end)
        assert mark and ended, f"{self.page} has no section {begin!r} … {end!r}"
        return before, text, after

    def write(self) -> None:
        begin, end = self.marks
        before, _, after = self.parts()
        self.page.write_text(before + begin + self.text() + end + after)


@dataclass(frozen=True)
class Whole:
    """A file that is generated as a whole."""

    name: str
    page: Path
    text: Callable[[], str]

    def parts(self) -> tuple[str, str, str]:
        return "", self.page.read_text(), ""

    def write(self) -> None:
        self.page.write_text(self.text())


SECTIONS: list[Section | Whole] = [
    Section("rooms", ROOT / "docs/architecture.md", rooms.page_map),
    Section("behaviours", ROOT / "docs/coverage.md", coverage_page.behaviours),
    Section("detectors", ROOT / "docs/reliability.md", detectors.table),
    Section("families", ROOT / "docs/engine.md", families.table),
    Section("forms", ROOT / "docs/tools.md", forms_page.table),
    Section("engines", ROOT / "docs/engines.md", engines_page.table),
    Whole("defaults", DEFAULTS_FILE, families.defaults),
]


if __name__ == "__main__":
    for section in SECTIONS:
        section.write()
