"""Every family's answers become reasoning, text and calls: however they are cut."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from api.chat.piece import Piece
from api.chat.reading.table import TABLE
from api.schemas.view import Calling, Reading, ThinkingMarks
from ops.bench.hostile.answers import check_answer, read, tokens_of
from tests.unit.api.chat.spoken import SPOKEN

NAMES = ["get_weather", "get_time"]
LITERAL = {"get_weather": ["days", "on", "tags", "where", "none"]}
SIMPLE: dict[str, Any] = {"city": "Paris", "days": 2}
NESTED: dict[str, Any] = {
    "city": 'Zürich "東京" 😀 \\ it\'s',
    "days": -3,
    "on": True,
    "tags": ["a", "b, c", {"k": None}],
    "where": {"x": {"y": [1.5, False]}, "z": ""},
    "none": None,
    "note": "two\nlines, {braces} [and] (brackets)",
}
MARKS = {"city": "</think> <tool_call> [TOOL_CALLS] <|end> </parameters> ]}", "days": 1}
"""Marks inside of a text, none of which is the one that ends a value in any of the forms."""


def reading(name: str, begun: bool = False) -> Reading:
    spoken, form = SPOKEN[name], TABLE[name]
    thinking = None
    if spoken.think is not None:
        pair = form.reasoning[0]
        thinking = ThinkingMarks(pair.open if form.channels else pair.open.strip(), pair.close.strip(), begun)
    return Reading(thinking, Calling(name, NAMES, LITERAL), form=name)


def shown(piece: Piece) -> tuple[str, str, list[tuple[str | None, Any]]]:
    return piece.text, piece.reasoning, [(call.name, json.loads(call.arguments)) for call in piece.calls]


def agree(how: Reading, said: str) -> tuple[str, str, list[tuple[str | None, Any]]]:
    """What the answer is; the same in one piece, by characters and by pairs of them."""
    whole = read(how, [said])
    assert whole == read(how, list(said))
    assert whole == read(how, [said[at : at + 2] for at in range(0, len(said), 2)])
    return shown(whole)


def test_every_form_is_spoken() -> None:
    assert SPOKEN.keys() == TABLE.keys()


@pytest.mark.parametrize("name", SPOKEN)
@pytest.mark.parametrize("arguments", [SIMPLE, NESTED, MARKS, {}], ids=["simple", "nested", "marks", "none"])
def test_one_call(name: str, arguments: dict[str, Any]) -> None:
    """Its name, and its arguments with their types, whatever stands in them."""
    assert agree(reading(name), SPOKEN[name].calls(("get_weather", arguments))) == (
        "",
        "",
        [("get_weather", arguments)],
    )


@pytest.mark.parametrize("name", SPOKEN)
def test_calls_in_parallel(name: str) -> None:
    """Each with its own arguments, in their order."""
    calls = [("get_weather", SIMPLE), ("get_time", {}), ("get_weather", NESTED)]
    assert agree(reading(name), SPOKEN[name].calls(*calls)) == ("", "", calls)


@pytest.mark.parametrize("name", SPOKEN)
def test_text_before_a_call(name: str) -> None:
    """The text is content, without its marks and the white space before the call."""
    spoken = SPOKEN[name]
    said = f"{spoken.text[0]}I look.{spoken.text[1]}\n{spoken.calls(('get_weather', SIMPLE))}"
    found = agree(reading(name), said) if spoken.beside else (said, "", [])
    assert found == (("I look.", "", [("get_weather", SIMPLE)]) if spoken.beside else (said, "", []))


@pytest.mark.parametrize("name", [name for name, spoken in SPOKEN.items() if spoken.think])
def test_reasoning_before_text_and_calls(name: str) -> None:
    """The reasoning is told from the rest; a prompt may have begun it."""
    spoken = SPOKEN[name]
    assert spoken.think is not None
    opened, closed = spoken.think
    call = spoken.calls(("get_weather", SIMPLE))
    text = f"{spoken.text[0]}So.{spoken.text[1]}"
    assert agree(reading(name), f"{opened}I think.{closed}{text}{call}") == (
        "So.",
        "I think.",
        [("get_weather", SIMPLE)],
    )
    assert agree(reading(name, begun=True), f"I think.{closed}{call}") == ("", "I think.", [("get_weather", SIMPLE)])
    assert agree(reading(name), f"{opened}I think.{closed}{text}") == ("So.", "I think.", [])
    assert agree(reading(name), f"{opened}I think")[1] == "I think"


@pytest.mark.parametrize("name", [name for name, spoken in SPOKEN.items() if spoken.think and spoken.nested])
def test_a_call_inside_of_reasoning(name: str) -> None:
    """It is a call where it names a function that is offered, else it is a thought."""
    spoken = SPOKEN[name]
    assert spoken.think is not None
    opened, closed = spoken.think
    inside = spoken.calls(("get_weather", SIMPLE))
    text, reasoning, calls = agree(reading(name), f"{opened}I think. {inside} Well.{closed}Done")
    assert (text, calls) == ("Done", [("get_weather", SIMPLE)]) and reasoning.split() == ["I", "think.Well."]
    other = spoken.calls(("other", SIMPLE))
    text, reasoning, calls = agree(reading(name), f"{opened}I think. {other} Well.{closed}Done")
    assert (text, calls) == ("Done", []) and "other" in reasoning


@pytest.mark.parametrize("name", SPOKEN)
def test_a_call_that_is_cut_short(name: str) -> None:
    """Wherever it ends, it is a text or a call with what there is; nothing raises, and no argument is made up."""
    said = SPOKEN[name].calls(("get_weather", NESTED))
    for end in range(0, len(said), 3):
        how = reading(name)
        pieces = read(how, [said[:end]])
        assert pieces == read(how, list(said[:end]))
        for call in pieces.calls:
            assert call.name == "get_weather"
    [call] = read(reading(name), [said[: said.index("東") + 1]]).calls
    assert call.arguments == '{"city": "Zürich \\"東'


@pytest.mark.parametrize("name", SPOKEN)
def test_marks_that_are_tokens(name: str) -> None:
    """A mark that comes as a special token means what its text means, and is never said."""
    spoken, finder = SPOKEN[name], tokens_of(name)
    calls = [("get_weather", NESTED), ("get_time", {})]
    opened, closed = spoken.think or ("", "")
    text = f"{spoken.text[0]}So.{spoken.text[1]}" if spoken.beside else ""
    said = f"{opened}I think.{closed if spoken.think else ''}{text}" if spoken.think else text
    said += spoken.calls(*calls)
    parts = [part for part in finder.split(said) if part]
    marks = tuple(part for part in parts if finder.fullmatch(part))
    pieces = read(reading(name), parts, marks)
    assert shown(pieces) == ("So." if text else "", "I think." if spoken.think else "", calls)
    by_character = [one for part in parts for one in ([part] if part in marks else part)]
    assert read(reading(name), by_character, marks) == pieces


@pytest.mark.parametrize(
    ("said", "text", "reasoning", "calls"),
    [
        ("Hello <b>", "Hello <b>", "", []),
        ("<|channel|>final<|message|>Hello <b><|return|>", "Hello <b>", "", []),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
            "",
            "a\n\nb",
            [],
        ),
        (
            "<|channel|>commentary<|message|>Look.<|end|><|start|>assistant<|channel|>final<|message|>Done.",
            "Look.\n\nDone.",
            "",
            [],
        ),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', "", "", [("f", {"a": 1})]),
        (
            '<|channel|>analysis<|message|>a<|end|><|start|>assistant to=f<|channel|>commentary <|constrain|>json'
            '<|message|>{}<|call|>',
            "",
            "a",
            [("f", {})],
        ),
        ("<|channel|>final", "", "", []),
        ("tomorrow", "tomorrow", "", []),
    ],
)  # fmt: skip
def test_harmony_s_channels(said: str, text: str, reasoning: str, calls: list[Any]) -> None:
    """A header says what a text is; without one it is content. Two texts of a kind are two paragraphs."""
    assert agree(reading("harmony"), said) == (text, reasoning, calls)
    finder = tokens_of("harmony")
    parts = [part for part in finder.split(said) if part]
    assert shown(read(reading("harmony"), parts, tuple(part for part in parts if finder.fullmatch(part)))) == (
        text,
        reasoning,
        calls,
    )


FUZZED = 2_000


@pytest.mark.parametrize("seed", range(4))
def test_hostile_answers(seed: int) -> None:
    """No exception, the same whatever the cuts, no control token in the text, and no word is lost."""
    names = list(SPOKEN)
    for number in range(FUZZED // 4):
        random = Random(f"{seed}:{number}")
        check_answer(random.choice(names), random)
