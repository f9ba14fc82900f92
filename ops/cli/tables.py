"""Tables, lines and JSON on standard output. Text of others in them has no control characters and no line breaks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO, TypeVar

import click
import msgspec

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

Item = TypeVar("Item")

LONGEST_CELL = 500
"""Characters of a cell; the rest is cut off. JSON has all of it."""
LONGEST_LINE = 4_000

_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_DIRECTIONS = dict.fromkeys((0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))
"""Marks that turn the direction of the text after them, so that a name could change how the rest of its line reads."""
_BREAKS = dict.fromkeys((0x0A, 0x0D, 0x09, 0x0B, 0x0C, 0x85, 0x2028, 0x2029), " ")
_IN_A_LINE = _CONTROLS | _DIRECTIONS | _BREAKS


def plain(text: str) -> str:
    """Text of a model, a repository or a server without control characters, which could move the cursor or change the
    terminal's state. Newlines and tabs stay.

    >>> plain("a\x1b[2Jb")
    'a[2Jb'
    """
    return text.translate(_CONTROLS)


def fit(text: str, file: TextIO | None = None) -> str:
    """`plain` where `file`, standard output by default, is a terminal; else the text as it is."""
    return plain(text) if (file or sys.stdout).isatty() else text


def one_line(text: str, most: int | None = None) -> str:
    """Text of others as a part of one line: as `plain`, without marks of direction, and with spaces for line breaks.
    Of more than `most` characters the end is cut off.

    >>> one_line("a\x1b[2Jb\\nc\u202e", 5)
    'a[2J…'
    """
    clean = text.translate(_IN_A_LINE)
    return clean if most is None or len(clean) <= most else clean[: most - 1] + "…"


def lines_of(text: str) -> str:
    """A message of several lines, which may name what others wrote: each as `one_line`, all but the first indented."""
    first, *others = (one_line(line, LONGEST_LINE) for line in text.split("\n"))
    return "\n".join([first, *(line if line.startswith("  ") else f"  {line}" for line in others)])


def echo_line(text: str, err: bool = False) -> None:
    """Print one line, which may have text of others; in a pipe too, where a line break would look like a line more."""
    click.echo(one_line(text, LONGEST_LINE), err=err)


def echo_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of equally many cells, the first one being the header, in columns two spaces apart."""
    rows = [[one_line(cell, LONGEST_CELL) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def echo_list(
    items: Sequence[Item],
    columns: Mapping[str, Callable[[Item], object]],
    nothing: str,
    as_json: bool,
    described: Callable[[Item], Any] = lambda item: item,
) -> bool:
    """A row for each item, with the headings of `columns` and what they make of it; `nothing` is the line for no items.
    As JSON each item is what `described` makes of it. True if a table was printed."""
    if as_json:
        echo_json([described(item) for item in items])
    elif not items:
        echo_line(nothing)
    else:
        echo_table([tuple(columns), *([str(cell(item)) for cell in columns.values()] for item in items)])
        return True
    return False


def echo_json(data: Any) -> None:
    """Data with msgspec's or plain types, indented. A list is an array of objects, [] where there is none, and all else
    an object; fields are those of GET /farm where that has the same."""
    click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2))


def utc(seconds: float) -> str:
    """The time `seconds` after 1970 began, in UTC, as ISO 8601.

    >>> utc(0)
    '1970-01-01T00:00:00+00:00'
    """
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def duration(ms: float) -> str:
    """Milliseconds as people read them: 340 ms, 12.3 s, 4 min, 2 h.

    >>> duration(12_340)
    '12.3 s'
    """
    if ms < 1_000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f} s"
    return f"{ms / 60_000:.0f} min" if ms < 7_200_000 else f"{ms / 3_600_000:.0f} h"
