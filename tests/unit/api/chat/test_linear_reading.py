"""Reading is linear in white space: what a push reads again is counted, not timed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest

from api.chat.piece import Piece
from api.chat.reading.form import Form
from api.chat.reading.parser import AnswerParser
from api.chat.reading.table import TABLE
from api.chat.reading.writing import written_calls
from api.schemas.view import Calling, Reading, ThinkingMarks

BLANKS = " \n" * 128
PUSHES = 60
MOST_HELD = 2560
"""Characters that a reader may hold on average: it searches a bounded beginning for a head. All blanks held are three
times as many."""


def held(reader: Any) -> int:
    """The characters in strings of a reader and its parts: the next push adds to them and searches them again. Lists
    are left out, as they are joined once."""
    characters = 0
    for value in vars(reader).values():
        kind = type(value)
        if kind is str:
            characters += len(value)
        elif is_reader(kind):
            characters += held(value)
    return characters


@functools.cache
def is_reader(kind: type) -> bool:
    return kind.__module__.startswith("api.chat.reading")


def held_on_average(parser: AnswerParser, before: str) -> float:
    """Of the blanks after the text `before`."""
    parser.push(before, Piece(0, 0))
    at_first = held(parser)
    more = 0
    for _ in range(PUSHES):
        parser.push(BLANKS, Piece(0, 0))
        more += held(parser) - at_first
    return more / PUSHES


def parser(name: str, *, thinking: bool = False) -> AnswerParser:
    """Of a form; with `thinking` the answer may begin with reasoning."""
    form = TABLE[name]
    pair = form.reasoning[0] if thinking and form.channels is None else None
    marks = None if pair is None else ThinkingMarks(pair.open.strip(), pair.close.strip())
    return AnswerParser(Reading(marks, Calling(name, ["f"]), form=name if form.channels is not None else ""), "rid", 0)


def calls_of(form: Form) -> str:
    assert form.calls is not None
    return written_calls(form.calls, [("f", {"city": "Oslo"})] * 2)


REASONING = sorted(name for name, form in TABLE.items() if form.reasoning)


@pytest.mark.parametrize("name", REASONING)
def test_blanks_in_reasoning(name: str) -> None:
    """They are held apart until it is known whether more follows."""
    assert held_on_average(parser(name, thinking=True), f"{TABLE[name].reasoning[0].open}So") < MOST_HELD


@pytest.mark.parametrize("name", sorted(TABLE))
def test_blanks_before_in_and_after_calls(name: str) -> None:
    """After every part of them; a value that may be JSON is left out, because it is read as a whole."""
    calls = calls_of(TABLE[name])
    for at in range(0, len(calls) + 1, 2):
        assert held_on_average(parser(name), calls[:at]) < MOST_HELD, calls[:at]


def read(parser: AnswerParser, texts: Iterable[str]) -> tuple[str, str, list[tuple[str | None, str]]]:
    piece = Piece(0, 0)
    for text in texts:
        parser.push(text, piece)
    parser.end(piece)
    return piece.text, piece.reasoning, [(call.name, call.arguments) for call in piece.calls]


@pytest.mark.parametrize("blanks", [300, 1100, 2100])
@pytest.mark.parametrize("name", sorted(TABLE))
def test_cuts_among_many_blanks_do_not_matter(name: str, blanks: int) -> None:
    """Behind every bound of what is held, in calls and in reasoning."""
    form = TABLE[name]
    said = f"{form.reasoning[0].open}So" if form.reasoning else ""
    calls = calls_of(form)
    for at in range(0, len(calls) + 1, 13):
        text = calls[:at] + " " * blanks + calls[at:]
        assert read(parser(name), [text]) == read(parser(name), text), text
    text = f"{said}{' ' * blanks}on"
    assert read(parser(name, thinking=bool(said)), [text]) == read(parser(name, thinking=bool(said)), text)


@pytest.mark.parametrize("name", [name for name in REASONING if TABLE[name].channels is None])
def test_blanks_in_reasoning_are_reasoning(name: str) -> None:
    """Where more follows; before the closing mark they belong to it."""
    pair, blanks = TABLE[name].reasoning[0], "\n " * 1000
    text = f"{pair.open}So{blanks}on{blanks}{pair.close}{blanks}Fine."
    for texts in ([text], text):
        assert read(parser(name, thinking=True), texts) == ("Fine.", f"So{blanks}on", [])
    assert read(parser(name, thinking=True), f"{pair.open}So{blanks}")[1] == f"So{blanks}"
