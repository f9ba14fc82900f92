"""The table of failure detectors, from the code to docs/reliability.md: `python -m tests.detectors` writes it."""

from __future__ import annotations

from tests.rooms import ROOT
from worker.health.detectors import DETECTORS

PAGE = ROOT / "docs" / "reliability.md"
_BEGIN, _END = "<!-- detectors: python -m tests.detectors -->\n", "<!-- /detectors -->\n"


def table() -> str:
    rows = [f"| {one.fault} | {one.found_by} | {one.action} | {one.after} |\n" for one in DETECTORS]
    return "".join(["| fault | detector | action | after |\n", "|---|---|---|---|\n", *rows])


def parts() -> tuple[str, str, str]:
    """The page before its table, the table, and the page after it."""
    before, found, rest = PAGE.read_text().partition(_BEGIN)
    text, ended, after = rest.partition(_END)
    assert found and ended, f"{PAGE} has no place for the table: {_BEGIN!r} … {_END!r}"
    return before, text, after


def main() -> None:
    before, _, after = parts()
    PAGE.write_text(before + _BEGIN + table() + _END + after)


if __name__ == "__main__":
    main()
