"""The length of a chunk of prompts: alone and beside rows that decode."""

from __future__ import annotations

import pytest

from worker.leader.group_leader import limits_on
from worker.leader.serving import LEAST_TOKENS, MIXED_S, PREFILL_S, SLOW_TOKENS, ChunkSize


def taught(*steps: tuple[float, int]) -> ChunkSize:
    chunk_size = ChunkSize()
    for seconds, tokens in steps:
        chunk_size.observe(seconds, tokens)
    return chunk_size


def test_what_is_unknown_is_taken_for_slow() -> None:
    """Before any prompt was computed, and after short ones alone."""
    for chunk_size in (taught(), taught((0.001, SLOW_TOKENS - 1))):
        assert chunk_size.mixed == chunk_size.prefill == LEAST_TOKENS


@pytest.mark.parametrize(
    ("per_token", "mixed"), [(MIXED_S / 300, 300), (MIXED_S / 10, LEAST_TOKENS), (PREFILL_S, SLOW_TOKENS)]
)
def test_a_step_gets_what_it_has_time_for(per_token: float, mixed: int) -> None:
    """As many tokens as were computed in that time lately, however slow the model is never less than a few."""
    assert taught(*[(per_token * 500, 500)] * 3).mixed == pytest.approx(mixed, abs=1)


@pytest.mark.parametrize(("rate", "alone"), [(5000, 5000), (100, 100), (10, SLOW_TOKENS)])
def test_a_step_of_prompts_takes_a_second(rate: float, alone: int) -> None:
    """At 10 tokens a second a chunk of 512 would take a minute: nothing could be cancelled or claimed meanwhile."""
    assert taught((64 / rate, 64)).prefill == pytest.approx(alone, abs=1)


def test_rows_that_decode_say_nothing_about_prompts_alone() -> None:
    """Their time is not the prompts'."""
    chunk_size = taught((0.1, 100))
    chunk_size.observe(50.0, 100, decode_rows=200)
    assert chunk_size.prefill == 1000


def test_one_slow_step_changes_nothing() -> None:
    """The first step of a process warms it up, and any step may meet another process's work."""
    quick = (MIXED_S / 300 * 100, 100)
    assert taught((5.0, 100), quick, quick, quick).mixed == pytest.approx(300, abs=1)


def test_a_gpu_begins_with_larger_chunks() -> None:
    """Its steps take as long for one token as for hundreds, so a chunk that is cut to a time would stay small."""
    limits = limits_on("cuda:0")
    chunk_size = ChunkSize(limits.least_chunk)
    for _ in range(7):
        chunk_size.observe(1.5 * MIXED_S, chunk_size.mixed, decode_rows=3)
    assert chunk_size.mixed == limits.least_chunk > limits_on("cpu").least_chunk
    assert limits.token_budget > limits_on("cpu").token_budget
