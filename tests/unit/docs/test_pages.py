"""Generated sections and files are up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import SECTIONS, Section, Whole


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_section_is_as_the_code_generates_it(section: Section | Whole) -> None:
    """`make pages` writes it."""
    assert section.parts()[1] == section.text()


def test_writing_changes_the_section_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    section = Section("table", page, lambda: "new\n")
    begin, end = section.marks
    page.write_text(f"before\n{begin}old\n{end}after\n")
    section.write()
    assert page.read_text() == f"before\n{begin}new\n{end}after\n"


def test_a_page_without_the_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("text\n")
    with pytest.raises(AssertionError, match="has no section"):
        Section("table", page, str).write()
    assert page.read_text() == "text\n"
