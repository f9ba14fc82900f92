"""The most probable tokens in one read: of a step's rows, by the compiled library."""

from __future__ import annotations

import pytest
import torch

from tests.unit.worker.sampling.test_step_sampler import rows
from worker.engine.step import NO_TOKEN, Forward
from worker.native.library import NOT_FINITE, Threads, threads_here
from worker.sampling.sampler import StepSampler


@pytest.fixture(scope="module")
def threads() -> Threads:
    threads = threads_here()
    if threads is None:
        pytest.skip("no compiler")
    return threads


def best_tokens(threads: Threads, logits: torch.Tensor) -> list[int]:
    return threads.best_tokens(logits.numpy())


@pytest.mark.parametrize("vocabulary", [1, 5, 16, 1024, 1025, 4111])
def test_as_torch(threads: Threads, vocabulary: int) -> None:
    """In rows that lie apart from each other, as those of several ranks do."""
    whole = torch.randn(7, vocabulary + 3, generator=torch.Generator().manual_seed(vocabulary))
    logits = whole[:, :vocabulary]
    assert best_tokens(threads, logits) == logits.argmax(dim=-1).tolist()
    assert best_tokens(threads, -logits.abs() - 1e30) == (-logits.abs() - 1e30).argmax(dim=-1).tolist()
    assert best_tokens(threads, logits[:0]) == []


def test_the_first_of_equals(threads: Threads) -> None:
    logits = torch.zeros(2, 3000)
    logits[1, [2100, 2900]] = 1
    assert best_tokens(threads, logits) == [0, 2100]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 1023, 1024, 2999])
def test_a_row_that_is_not_finite(threads: Threads, value: float, place: int) -> None:
    logits = torch.ones(3, 3000)
    logits[1, place] = value
    assert best_tokens(threads, logits) == [0, NOT_FINITE, 0]


def test_a_step_reports_the_sick_row_alone(threads: Threads) -> None:
    """Rows that have more than an argmax, and log probabilities, get what they get from torch."""
    batch = [rows(1)[0], *rows(2)[1:], *rows(3, temperature=1.0, logprobs=2)[2:]]
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(1))
    sids = [row.sid for row in batch]
    alone = StepSampler().begin(batch, Forward(sids, logits)).wait()
    logits[1, 7] = float("nan")
    tokens = StepSampler().begin(batch, Forward(sids, logits.numpy(), threads=threads)).wait()
    assert tokens.ids == [alone.ids[0], NO_TOKEN, alone.ids[2]]
    assert tokens.logprobs[2].chosen == pytest.approx(alone.logprobs[2].chosen, abs=1e-6)
    assert [token for token, _ in tokens.logprobs[2].top] == [token for token, _ in alone.logprobs[2].top]
    assert set(tokens.failures) == {1} and "nan=1" in tokens.failures[1]
