"""`python -m ops.bench.hostile.answers`: answers that are made at random of pieces of each form, read and checked.

No exception, the same result whatever the cuts, no control token in the text, and no word is lost.
"""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import click

from api.chat.piece import Piece
from api.chat.reading.parser import AnswerParser
from api.chat.reading.table import TABLE
from api.chat.reading.writing import written_calls
from api.schemas.view import Calling, Reading, ThinkingMarks

NAMES = ["get_weather", "get_time"]
LITERAL = {"get_weather": ["days", "tags", "where"]}
ARGUMENTS: dict[str, Any] = {
    "city": 'Zürich "東京" 😀 \\ it\'s',
    "days": -3,
    "tags": ["a", "b, c", {"k": None}],
    "where": {"x": {"y": [1.5, False]}, "z": ""},
    "note": "two\nlines, {braces} [and] (brackets)",
}
MARK = re.compile(r"<\|\"\|>|<\|[^<>|\s]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^<>｜\s]+｜>|</?[A-Za-z_:]+>|\[/?[A-Z_]+\]")
"""Finds marks that are single tokens in vocabularies."""
_PLAIN = ["{", "}", "[", "]", '"', "\\", "\n", " ", ";", ",", "<", "😀", "東"]
_NO_TOKENS = re.compile(r"(?!)()")


class BadAnswer(Exception):
    """An answer was read wrongly; the message says how."""


@functools.cache
def tokens_of(name: str) -> re.Pattern[str]:
    """Finds the marks of a form that are single tokens in vocabularies."""
    marks = {mark for text in TABLE[name].marks for mark in MARK.findall(text)}
    return (
        re.compile("(" + "|".join(sorted(map(re.escape, marks), key=len, reverse=True)) + ")") if marks else _NO_TOKENS
    )


@functools.cache
def fragments(name: str) -> list[str]:
    """Pieces of which answers of a form are made."""
    form = TABLE[name]
    assert form.calls is not None
    call = written_calls(form.calls, [("get_weather", ARGUMENTS)])
    half = len(call) // 2
    pieces = [call, written_calls(form.calls, [("get_time", {}), ("get_weather", ARGUMENTS)])]
    pieces += [written_calls(form.calls, [("other", ARGUMENTS)]), call[:half], call[half:], call[:9]]
    pieces += [mark for pair in form.reasoning for mark in (pair.open, pair.close)]
    pieces += [*form.content, *form.answer, *tokens_of(name).findall(" ".join(form.marks))]
    return [piece for piece in pieces if piece] + _PLAIN


def read(reading: Reading, texts: Sequence[str], marks: Sequence[str] = ()) -> Piece:
    """The whole answer; a text that is one of the marks comes as a token."""
    parser = AnswerParser(reading, "rid", 0)
    whole = Piece(0, 0)
    for text in texts:
        piece = Piece(0, 0)
        parser.mark(text, piece) if text in marks else parser.push(text, piece)
        whole.collect(piece)
    piece = Piece(0, 0)
    parser.end(piece)
    whole.collect(piece)
    return whole


def check_answer(name: str, random: Random) -> None:
    """Read one answer that is made at random. Raises BadAnswer, and whatever the reader raises."""
    form = TABLE[name]
    words = [f"w{number}w" for number in range(random.randrange(8))]
    pieces = random.choices(fragments(name), k=random.randrange(8)) + words
    random.shuffle(pieces)
    text = "".join(pieces)
    pair = form.reasoning[0] if form.reasoning else None
    begun = random.random() < 0.3
    thinking = None if pair is None else ThinkingMarks(pair.open.strip(), pair.close.strip(), begun)
    reading = Reading(thinking, Calling(name, NAMES, LITERAL), form=name)
    finder = tokens_of(name) if random.random() < 0.5 else _NO_TOKENS
    parts = [part for part in finder.split(text) if part]
    marks = tuple(part for part in parts if finder.fullmatch(part))
    whole = read(reading, parts, marks)
    if whole != read(reading, [symbol for part in parts for symbol in ([part] if part in marks else part)], marks):
        raise BadAnswer(f"{name}: another result of single characters: {text!r}")
    if any(mark in whole.text for mark in marks):
        raise BadAnswer(f"{name}: a control token in the text {whole.text!r} of {text!r}")
    places = whole.text + whole.reasoning + "".join(f"{call.name} {call.arguments}" for call in whole.calls)
    places.encode()
    # A header has no place in a message.
    if form.channels is None and (lost := [word for word in words if word not in places]):
        raise BadAnswer(f"{name}: {lost} are lost of {text!r}")


@click.command()
@click.option("--streams", default=100_000, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True)
def main(streams: int, seed: int) -> None:
    """Read STREAMS hostile answers of all forms; status 1 after the first that is read wrongly."""
    names = list(TABLE)
    begin = time.perf_counter()
    for number in range(streams):
        random = Random(f"{seed}:{number}")
        try:
            check_answer(random.choice(names), random)
        except BadAnswer as error:
            click.echo(f"stream {number}: {error}", err=True)
            sys.exit(1)
    click.echo(
        f"{streams} answers of {len(names)} forms in {time.perf_counter() - begin:.0f} s: all read as they should be"
    )


if __name__ == "__main__":
    main()
