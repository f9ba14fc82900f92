"""Figures are right; and never made of nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.harness.program import percentile, summarise


def test_figures_of_a_known_list() -> None:
    """One to a hundred has its percentiles at their own names."""
    summary = summarise([float(value) for value in range(100, 0, -1)])
    assert (summary.count, summary.mean, summary.p50, summary.p95, summary.p99, summary.max) == (
        100,
        50.5,
        50,
        95,
        99,
        100,
    )


def test_one_value_is_every_figure() -> None:
    """A single value is its own mean and percentiles."""
    summary = summarise([7.0])
    assert (summary.count, summary.mean, summary.p50, summary.p95, summary.p99, summary.max) == (1, 7, 7, 7, 7, 7)


def test_no_values_have_no_figures() -> None:
    """An empty list is refused, never zero."""
    with pytest.raises(ValueError, match="no values"):
        summarise([])


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_a_percentile_is_a_measured_value_that_enough_values_do_not_exceed(values: list[float]) -> None:
    """Nearest rank: at least the share lies at or below it, and less than the share below."""
    ordered = sorted(values)
    for share in (50, 95, 99):
        percentile_value = percentile(ordered, share)
        assert percentile_value in values
        assert sum(value <= percentile_value for value in values) >= share / 100 * len(values)
        assert sum(value < percentile_value for value in values) < share / 100 * len(values)
