"""The tensor sampler's noise and launched steps: what it does beside the sampler of host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.worker.sampling.test_sampler import VOCABULARY, row
from worker.sampling.sampler import row_key
from worker.sampling.torch.sampler import TensorSampler, gumbel, key_column, noise_bits

CPU = torch.device("cpu")


def test_neighbouring_places_are_independent() -> None:
    """Noise of consecutive seeds, choices, positions and tokens is uniform and not correlated."""
    keys = [row_key(seed, choice, position) for seed in range(8) for choice in range(4) for position in range(8)]
    noise = noise_bits(key_column(keys, CPU), torch.arange(512)).double() * 2.0**-52
    assert len(set(keys)) == len(keys)
    assert abs(float(noise.mean()) - 0.5) < 0.003 and float(noise.min()) >= 0 and float(noise.max()) < 1
    correlation = torch.corrcoef(noise) - torch.eye(len(keys), dtype=torch.float64)
    assert float(correlation.abs().max()) < 0.25
    across = torch.corrcoef(noise.T) - torch.eye(512, dtype=torch.float64)
    assert float(across.abs().max()) < 0.4


def test_noise_is_splitmix64() -> None:
    """The tensor arithmetic equals the published generator in unbounded integers, whatever the sign bit."""
    mask = (1 << 64) - 1
    for key in (0, 1, mask, 2**63 - 1, 2**63, row_key(2**64 - 1, 0, 0)):
        for token in (0, 1, 151_935):
            value = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
            value ^= value >> 31
            assert noise_bits(key_column([key], CPU), torch.tensor([token])).item() == value >> 12


def test_gumbel_is_finite_and_rough_agrees() -> None:
    """The extreme bits give finite noise, and float32 noise is close wherever it is large enough to win."""
    bits = torch.tensor([0, 1, 12345, 2**40, 2**51, 2**52 - 1])
    exact = gumbel(bits)
    assert exact.isfinite().all()
    likely = exact > -2
    assert int(likely.sum()) == 5
    torch.testing.assert_close(gumbel(bits, torch.float32)[likely].double(), exact[likely], rtol=1e-5, atol=1e-5)


def test_greedy_batch_never_sorts_or_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of plain greedy rows is one argmax."""
    monkeypatch.setattr(torch.Tensor, "sort", None)
    monkeypatch.setattr(torch.Tensor, "topk", None)
    monkeypatch.setattr("worker.sampling.torch.sampler.gumbel", None)
    logits = torch.randn(3, VOCABULARY)
    sampled = TensorSampler().sample(logits, [row(temperature=0.0)] * 3)
    assert [one.token for one in sampled] == logits.argmax(-1).tolist()


def test_unfiltered_rows_do_not_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows without top_p and top_k are drawn without sorting the vocabulary."""
    monkeypatch.setattr(torch.Tensor, "sort", None)
    monkeypatch.setattr("worker.sampling.torch.sampler.keep_top_p", None)
    monkeypatch.setattr("worker.sampling.torch.sampler.keep_top_k", None)
    assert len(TensorSampler().sample(torch.randn(2, VOCABULARY), [row(), row(min_p=0.1)])) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_that_are_launched_are_those_that_are_sampled(dtype: torch.dtype) -> None:
    """Greedy rows, hot ones, seeds and positions of all kinds: without waiting on the way the tokens are the same."""
    torch.manual_seed(3)
    rows = [
        row(seed=seed, position=7 * seed, temperature=temperature, min_p=min_p)
        for seed in range(20)
        for temperature, min_p in ((0.0, 0.0), (1.0, 0.0), (0.4, 0.1), (1e6, 0.0))
    ]
    logits = torch.randn(len(rows), VOCABULARY, dtype=dtype) * 3
    expected = [sampled.token for sampled in TensorSampler().sample(logits, rows)]
    for some in (rows, rows[1::4], rows[::4]):
        chosen = [rows.index(one) for one in some]
        launched = TensorSampler().launch(logits[chosen], some)
        assert launched is not None and launched.tolist() == [expected[index] for index in chosen]
    assert len(set(expected)) > 30


@pytest.mark.parametrize(
    "wish", [{"top_k": 3}, {"top_p": 0.9}, {"logprobs": 0}, {"typical_p": 0.5}, {"forbidden": [1]}]
)
def test_what_reads_on_the_way_is_not_launched(wish: dict[str, Any]) -> None:
    """One such row sends the whole step the other way."""
    assert TensorSampler().launch(torch.zeros(2, VOCABULARY), [row(), row(temperature=1.0, **wish)]) is None
    assert TensorSampler().launch(torch.zeros(1, VOCABULARY), [row(repetition_penalty=1.1)]) is None
    assert TensorSampler().launch(torch.zeros(1, VOCABULARY), [row(logit_bias={1: 1.0})]) is None
    assert TensorSampler().launch(torch.zeros(1, VOCABULARY), [row(min_tokens=2, stop_ids=[1])]) is None
