"""The table of forms: one file each, in the form of transformers' `response_template` and Furrow's extensions to it.

A file also names the signs of its form: texts of a chat template or of the vocabulary, the shape of what the template
writes. A model's name is no sign, and neither is one tag alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import msgspec

from api.chat.reading.form import Form, Pair
from api.chat.reading.response_template import form_of

FOLDER = Path(__file__).parent / "forms"


class Signs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A form has these signs: all of `template` stands in the chat template, all of `tokens` in the vocabulary."""

    template: list[str] = []
    tokens: list[str] = []


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the table."""

    order: int
    """Rows are tried in this order: a form whose marks are a part of another's comes later."""
    models: str
    """The families that write it, for people."""
    signs: list[Signs]
    """A form has one of these at least."""
    response_template: Any


@functools.cache
def rows() -> dict[str, Row]:
    """All rows by name, in the order in which they are tried."""
    decode = msgspec.json.Decoder(Row).decode
    read = {path.stem: decode(path.read_bytes()) for path in FOLDER.glob("*.json")}
    return dict(sorted(read.items(), key=lambda item: (item[1].order, item[0])))


def _table() -> dict[str, Form]:
    return {name: form_of(name, row.response_template) for name, row in rows().items()}


TABLE: dict[str, Form] = _table()
"""The forms by name."""


@functools.cache
def reasoning_pairs() -> tuple[Pair, ...]:
    """The marks of reasoning of all forms."""
    pairs = [pair for form in TABLE.values() if form.channels is None for pair in form.reasoning]
    return tuple({(pair.open, pair.close): pair for pair in pairs}.values())
