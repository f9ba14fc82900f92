"""The table of tolerance in docs/api.md is in force: requests are read by the same one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api.schemas.tolerance import TABLE, Alias, Hint, Ignored, Treatment, Unsupported

PAGE = (Path(__file__).parents[3] / "docs/api.md").read_text()


def named(treatment: str) -> str:
    """The fields' cell of one row of the page."""
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {treatment}")]
    return row.split(" | ")[1].removesuffix(" |")


@pytest.mark.parametrize(
    ("treatment", "kind"),
    [
        ("accepted without effect", Hint),
        ("another name", Alias),
        ("ignored with a warning", Ignored),
        ("refused with 400, unless", Unsupported),
    ],
)
def test_each_row_names_the_fields_of_the_table(treatment: str, kind: type[Treatment]) -> None:
    """Both ways: no field is missing on the page, and the page has no other."""
    shown = re.findall(r"`([^`]+)`(?:,|;|$)", named(treatment).replace(" → ", "→"))
    names = [re.sub(r"^.*→", "", name) for name in shown] if kind is not Alias else []
    if kind is Alias:
        names = re.findall(r"`([^`]+)` → ", named(treatment))
    assert sorted(names) == sorted(name for name, row in TABLE.items() if isinstance(row, kind))


def test_another_name_says_which() -> None:
    """Each pair of names on the page is one of the table."""
    pairs = dict(re.findall(r"`([^`]+)` → (`[^,]+)", named("another name")))
    for name, row in TABLE.items():
        if isinstance(row, Alias):
            assert re.findall(r"`([^`/]+)`", pairs[name]) == list(row.to), name
