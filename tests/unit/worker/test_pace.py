"""How long a chunk of prompts may be beside rows that decode."""

from __future__ import annotations

import pytest

from worker.pace import BESIDE_S, LEAST_TOKENS, Pace


def taught(*steps: tuple[float, int]) -> int:
    pace = Pace()
    for seconds, tokens in steps:
        pace.observe(seconds, tokens)
    return pace.beside


def test_what_is_unknown_is_taken_for_slow() -> None:
    """Before any prompt was computed, and after short ones alone."""
    assert taught() == taught((0.001, LEAST_TOKENS - 1)) == LEAST_TOKENS


@pytest.mark.parametrize(("per_token", "beside"), [(BESIDE_S / 300, 300), (BESIDE_S, LEAST_TOKENS)])
def test_a_step_gets_what_it_has_time_for(per_token: float, beside: int) -> None:
    """As many tokens as were computed in that time lately, however slow the model is never less than a few."""
    assert taught(*[(per_token * 500, 500)] * 3) == pytest.approx(beside, abs=1)


def test_one_slow_step_changes_nothing() -> None:
    """The first step of a process warms it up, and any step may meet another process's work."""
    quick = (BESIDE_S / 300 * 100, 100)
    assert taught((5.0, 100), quick, quick, quick) == pytest.approx(300, abs=1)
