"""A request's stamps become segments: those that docs/performance.md defines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ops.bench.load.load import SEGMENTS, ClocksDiffer, durations

STAMPS = {
    "t_received": 1000.0,
    "t_enqueued": 1003.0,
    "t_claimed": 1010.0,
    "t_prefill": 1011.0,
    "t_first": 1031.0,
    "t_last": 1131.0,
    "t_delivered": 1133.0,
    "client_end": 1134.5,
}


def test_each_segment_is_the_time_between_its_two_stamps() -> None:
    """A complete set of stamps gives all eight."""
    assert durations(STAMPS) == {
        "parse": 3,
        "queue": 7,
        "claim": 1,
        "prefill": 20,
        "first token": 31,
        "decode": 100,
        "publish": 2,
        "deliver": 1.5,
    }


@pytest.mark.parametrize("stamp", STAMPS)
def test_a_missing_stamp_leaves_out_exactly_its_segments(stamp: str) -> None:
    """Nothing is made up for a stamp that is not there."""
    duration_list = durations({name: value for name, value in STAMPS.items() if name != stamp})
    assert set(SEGMENTS) - set(duration_list) == {name for name, pair in SEGMENTS.items() if stamp in pair}


def test_a_little_less_than_nothing_is_nothing() -> None:
    """Rounding of two processes' milliseconds is no fault."""
    assert durations({**STAMPS, "client_end": 1132.2})["deliver"] == 0


def test_wrong_clocks_are_said() -> None:
    """A segment that ends long before it begins names the stamps."""
    with pytest.raises(ClocksDiffer, match="t_received and t_enqueued differ"):
        durations({**STAMPS, "t_received": 5000.0})


def test_the_documentation_defines_the_same_segments() -> None:
    """docs/performance.md names each segment with the stamps that the code uses."""
    text = (Path(__file__).parents[4] / "docs" / "performance.md").read_text()
    matches = {
        name: (begin, end) for name, begin, end in re.findall(r"^\| ([a-z ]+) \| `(\w+)` → `(\w+)` \|", text, re.M)
    }
    assert matches == SEGMENTS
