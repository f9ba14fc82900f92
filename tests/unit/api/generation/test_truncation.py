"""Truncation drops the oldest items together; and those that go with them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.generation.context import droppable
from api.schemas.items import Item, read_items


def kept(items: list[Item], count: int) -> list[str]:
    """The items that are left after so many steps, as a word for each."""
    gone = {index for step in droppable(items)[:count] for index in step}
    return [name(item) for index, item in enumerate(items) if index not in gone]


def name(item: Item) -> str:
    return item["content"][0]["text"] if item["type"] == "message" else f"{item['type']} {item['call_id']}"


def items(*words: str) -> list[Item]:
    """`u1` a user's message, `a1` the assistant's, `s1` the system's, `c1` a call, `r1` its result."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    rows: list[dict[str, Any]] = []
    for word in words:
        if word[0] == "c":
            rows.append({"type": "function_call", "call_id": word[1:], "name": "f", "arguments": "{}"})
        elif word[0] == "r":
            rows.append({"type": "function_call_output", "call_id": word[1:], "output": "x"})
        else:
            rows.append({"role": roles[word[0]], "content": word})
    return read_items(rows, "0")


CALL, RESULT = "function_call 1", "function_call_output 1"


@pytest.mark.parametrize(
    ("words", "count", "left"),
    [
        ("u1 a1 u2 a2 u3", 1, ["u2", "a2", "u3"]),
        ("u1 a1 u2 a2 u3", 2, ["u3"]),
        ("u1 a1 u2 a2 u3", 9, ["u3"]),
        ("s1 u1 a1 s2 u2", 1, ["s1", "s2", "u2"]),
        ("u1 u2 a1 u3", 1, ["u3"]),
        ("a0 u1 a1 u2", 1, ["u1", "a1", "u2"]),
        ("u1 c1 r1 a1 u2", 1, ["u2"]),
        ("u1 c1 u2 r1 a2 u3", 1, ["u2", "a2", "u3"]),
        ("u1 c1 r1 c2 r2 c3 r3", 1, ["u1", *(f"function_call{o} {i}" for i in "23" for o in ("", "_output"))]),
        ("u1 c1 r1 c2 r2 c3 r3", 9, ["u1", "function_call 3", "function_call_output 3"]),
        ("u1 c1 c2 r1 r2 a1 c3", 1, ["u1", "a1", "function_call 3"]),
        ("u1", 9, ["u1"]),
        ("s1", 9, ["s1"]),
    ],
)
def test_the_oldest_go_first(words: str, count: int, left: list[str]) -> None:
    """Whole turns, then steps of the last one; never the system's words, the last question or the last step."""
    assert kept(items(*words.split()), count) == left


@given(st.lists(st.sampled_from(["u", "a", "s", "c", "r"]), max_size=12), st.integers(0, 12))
def test_no_call_without_its_result(kinds: list[str], count: int) -> None:
    """However the items stand, a result is never left without the call that it answers."""
    numbers = {"c": 0, "r": 0}
    words: list[str] = []
    for kind in kinds:
        if kind in numbers:
            numbers[kind] += 1
            if kind == "r" and numbers["r"] > numbers["c"]:
                continue
        words.append(f"{kind}{numbers.get(kind, 0)}")
    left = kept(items(*words), count)
    for word in left:
        if word.startswith("function_call_output "):
            assert f"function_call {word.split()[1]}" in left
    assert [word for word in words if word[0] == "s"] == [word for word in left if word[0] == "s"]


def test_truncation_of_no_items_is_empty() -> None:
    """Nothing may go of nothing."""
    assert droppable([]) == []
