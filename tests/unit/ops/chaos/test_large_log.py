"""A damaged large log of a chaos run is found."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from control.messages import LogEntry
from ops.chaos.faults.large_log import CHOICES, DELIVERED, delivered, wrong

PREFIX = [LogEntry(1, 0, 7), LogEntry(2, 1, 8, "stop", "token")]
WHOLE = [*PREFIX, LogEntry(3, 0, 9), LogEntry(4, 0, 9, "length", "length")]


def test_a_delivered_log_leaves_one_choice_open() -> None:
    """Its entries count from 1 without a gap, and every other choice has its end with its last token."""
    entries = delivered(random.Random(1), 5)
    assert [entry.seq for entry in entries] == list(range(1, CHOICES * DELIVERED + 1))
    assert Counter(entry.choice for entry in entries) == dict.fromkeys(range(CHOICES), DELIVERED)
    ended = [entry.choice for entry in entries if entry.finish is not None]
    assert ended == [choice for choice in range(CHOICES) if choice != 5]
    assert {entry.choice for entry in entries[-CHOICES:]} == set(range(CHOICES))


def test_an_exact_log_has_nothing_wrong() -> None:
    """The delivered part is compared with the undisturbed answer."""
    assert wrong(WHOLE, PREFIX, WHOLE) is None


@pytest.mark.parametrize(
    ("logged", "why"),
    [
        (WHOLE[:3], "3 entries, not 4"),
        (WHOLE[:2] + WHOLE[3:], "entry 3 has seq 4"),
        (WHOLE[:3] + WHOLE[2:], "entry 4 has seq 3"),
        ([LogEntry(1, 0, 1), *WHOLE[1:]], "entry 1"),
        ([*WHOLE[:2], LogEntry(3, 0, 1), WHOLE[3]], "entry 3"),
        ([*WHOLE[:3], msgspec.structs.replace(WHOLE[3], finish="stop")], "entry 4"),
        ([*WHOLE, LogEntry(5, 0, 9)], "entry 5"),
    ],
)
def test_a_damaged_log_is_found(logged: list[LogEntry], why: str) -> None:
    """An end that is missing, a gap, a repeat, other tokens in either part, another finish, and an entry too many."""
    assert why in (wrong(logged, PREFIX, WHOLE) or "")
