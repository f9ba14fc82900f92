"""Chaos schedules are a function of the seed; and strike as often as asked."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.run import EARLY_IN_A_ROW, schedule

KINDS = ["rank-kill", "api-kill", "redis-kill"]


@given(seed=st.integers(), times=st.integers(1, 30))
def test_each_kind_strikes_as_often_as_asked(seed: int, times: int) -> None:
    """In whatever order the seed gives."""
    assert Counter(strike.kind for strike in schedule(KINDS, times, seed)) == dict.fromkeys(KINDS, times)


@given(seed=st.integers())
def test_the_farm_comes_to_rest_now_and_then(seed: int) -> None:
    """The first strike finds it whole, and early strikes never go on without end."""
    early = [strike.early for strike in schedule(KINDS, 30, seed)]
    assert not early[0]
    runs = "".join("e" if one else "." for one in early).split(".")
    assert max(map(len, runs)) <= EARLY_IN_A_ROW


def test_a_seed_repeats_its_schedule() -> None:
    """The same seed strikes the same, another one does not."""
    assert schedule(KINDS, 5, 3) == schedule(KINDS, 5, 3)
    assert schedule(KINDS, 5, 3) != schedule(KINDS, 5, 4)


def test_some_strikes_come_early() -> None:
    """In a long run there are recoveries that are struck themselves."""
    assert any(strike.early for strike in schedule(KINDS, 30, 1))
