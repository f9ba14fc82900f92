"""A custom tool's text is read from cut JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.chat.text_argument import TextArgument


def read(raw: str, cuts: int) -> tuple[list[str], str]:
    """The parts in which the value came, where `raw` came in pieces of `cuts` characters."""
    argument = TextArgument("input")
    parts = [argument.push(raw[at : at + cuts]) for at in range(0, len(raw), cuts)]
    parts.append(argument.end())
    return parts, argument.text


@settings(deadline=None)
@given(text=st.text(), cuts=st.integers(1, 9), ascii_only=st.booleans())
def test_the_parts_are_the_text_wherever_it_is_cut(text: str, cuts: int, ascii_only: bool) -> None:
    parts, whole = read(json.dumps({"input": text}, ensure_ascii=ascii_only), cuts)
    assert "".join(parts) == whole == text


def test_a_text_comes_as_it_is_written() -> None:
    argument = TextArgument("input")
    assert argument.push('{"input": "*** Begin') == "*** Begin"
    assert argument.push("\\") == ""
    assert argument.push("n+") == "\n+"
    assert argument.push('"}') == ""
    assert argument.end() == "" and argument.text == "*** Begin\n+"


@pytest.mark.parametrize(
    "raw, text",
    [
        ("{}", ""),
        ('{"other": 1, "input": "late"}', "late"),
        ('{"other": "x"}', '{"other": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("nonsense", "nonsense"),
        ('{"input": "cut sho', "cut sho"),
        ('{"input": "half \\ud83d', "half "),
        ('{"input": "odd \\ud83d."}', "odd \ufffd."),
        ('{"input": "bad \\uZZZZ"}', "bad \ufffdZZZZ"),
        ('{"input": "real\nbreak"}', "real\nbreak"),
    ],
)
@pytest.mark.parametrize("cuts", [1, 1000])
def test_other_forms_are_the_value_themselves(raw: str, text: str, cuts: int) -> None:
    parts, whole = read(raw, cuts)
    assert "".join(parts) == whole == text


def test_long_arguments_without_the_name_are_held_once() -> None:
    """The beginning is looked for in a bounded part of them."""
    raw = json.dumps({"other": "x" * 100_000})
    assert read(raw, 7)[1] == raw
