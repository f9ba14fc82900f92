"""Logits that are not numbers are found and described; healthy ones cost one reduction."""

from __future__ import annotations

import math

import pytest
import torch

from worker.sampling.step_sampler import LogitsHealth, inspect

NAN, INF = math.nan, math.inf


def test_healthy_rows_are_not_reported() -> None:
    """Finite logits give no report."""
    assert inspect(torch.randn(4, 100)) == {}


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_single_bad_value_is_found(value: float, dtype: torch.dtype) -> None:
    """One value among many makes its row sick, and only its row."""
    logits = torch.zeros(3, 1000, dtype=dtype)
    logits[1, 777] = value
    assert list(inspect(logits)) == [1]


def test_the_report_counts_each_kind_of_number() -> None:
    """The report counts each kind and describes the finite rest."""
    logits = torch.tensor([[NAN, INF, INF, -INF, -INF, -INF, -2.0, 4.0, 1.0]])
    assert inspect(logits) == {0: LogitsHealth(len=9, nan=1, pos_inf=2, neg_inf=3, finite_min=-2.0, max=4.0, mean=1.0)}


def test_a_row_without_finite_values_has_no_minimum() -> None:
    """A row without a finite value has no minimum, maximum and mean."""
    assert inspect(torch.full((1, 3), NAN))[0] == LogitsHealth(
        len=3, nan=3, pos_inf=0, neg_inf=0, finite_min=None, max=None, mean=None
    )


def test_infinities_of_both_signs_are_found() -> None:
    """Infinities of both signs don't hide each other."""
    assert list(inspect(torch.tensor([[INF, -INF, 0.0]]))) == [0]


def test_large_finite_values_are_healthy() -> None:
    """Finite values of which the sum overflows are no fault."""
    assert inspect(torch.full((1, 10), 3e38)) == {}


def test_healthy_batch_costs_one_reduction(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row of a healthy batch is looked at by itself."""
    monkeypatch.setattr("worker.sampling.step_sampler._report", None)
    monkeypatch.setattr(torch.Tensor, "all", None)
    assert inspect(torch.zeros(4, 10)) == {}
