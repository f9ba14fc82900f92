"""C++ and tensor samplers agree: tokens and log probabilities, whatever the parameters."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from control.messages import TokenLogprobs
from tests.unit.worker.sampling.test_sampler import row
from worker.native.library import threads_here
from worker.sampling.sampler import NoTokenLeft, SampledToken, Sampler, SamplingRow
from worker.sampling.torch.sampler import TensorSampler

VOCABULARIES = (2, 8, 50, 999, 5003)


def any_row(chance: random.Random, vocabulary: int) -> SamplingRow:
    some = [chance.randrange(vocabulary) for _ in range(60)]
    biases = {some[0]: 5.0, some[1]: -100.0, vocabulary + 7: 3.0}
    one = row(
        seed=chance.randrange(2**64),
        position=chance.randrange(5),
        prompt=some[2:32],
        output=some[32:52],
        forbidden=chance.choice([(), (), some[52:53], [vocabulary + 1]]),
        temperature=chance.choice([0, 1e-4, 0.3, 0.7, 1, 2, 100]),
        top_k=chance.choice([0, 0, 1, 5, 50, 1000, 10**6]),
        top_p=chance.choice([1, 1, 0.9, 0.5, 0.999, 1e-9]),
        min_p=chance.choice([0, 0, 0.01, 0.2, 1]),
        typical_p=chance.choice([1, 1, 1, 0.9, 0.2]),
        top_n_sigma=chance.choice([0, 0, 0.5, 1.5]),
        xtc_probability=chance.choice([0, 0, 0.5, 1]),
        xtc_threshold=chance.choice([0.05, 0.2]),
        dynatemp_range=chance.choice([0, 0, 0.5, 5]),
        dynatemp_exponent=chance.choice([1, 2]),
        reductions=chance.choice([{}, {some[0]: 3.5, some[55]: 1e30, vocabulary + 3: 1.0}]),
        repetition_penalty=chance.choice([1, 1, 1.3, 0.7]),
        presence_penalty=chance.choice([0, 0, 1.5]),
        frequency_penalty=chance.choice([0, 0.5, -0.3]),
        logit_bias=chance.choice([{}, biases]),
        logprobs=chance.choice([None, 0, 3, 20]),
        min_tokens=chance.choice([0, 3]),
        stop_ids=some[53:54],
    )
    if chance.random() < 0.3:
        allowed = np.frombuffer(chance.randbytes(-(-vocabulary // 8)), np.uint8).copy()
        allowed[0] |= 1
        one = dataclasses.replace(one, allowed=allowed)
    return one if one.forbidden or chance.random() < 0.95 else dataclasses.replace(one, forced=some[54])


def sampled_by(sampler: Sampler | TensorSampler, logits: torch.Tensor, one: SamplingRow) -> SampledToken | None:
    try:
        rows = logits if isinstance(sampler, TensorSampler) else logits.numpy()
        return sampler.sample(rows, [one])[0]  # type: ignore[arg-type]
    except NoTokenLeft:
        return None


def assert_close(ours: TokenLogprobs | None, theirs: TokenLogprobs | None) -> None:
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    values = [(ours.chosen, theirs.chosen), *((a, b) for (_, a), (_, b) in zip(ours.top, theirs.top, strict=True))]
    assert all(a == pytest.approx(b, abs=1e-5, rel=1e-6) for a, b in values)


def test_any_row() -> None:
    """Bits of the noise, order and precision of what is computed are the same. Of equals at the border of top_p each
    keeps its own, so no two logits are equal here."""
    threads = threads_here()
    if threads is None:
        pytest.skip("no compiler, or a processor without AVX2")
    chance, compiled, tensors = random.Random(5), Sampler(threads), TensorSampler()
    for number in range(600):
        vocabulary = chance.choice(VOCABULARIES)
        generator = torch.Generator().manual_seed(number)
        logits = torch.randn(1, vocabulary, generator=generator) * chance.choice([0.01, 1, 3, 10, 100])
        one = any_row(chance, vocabulary)
        ours, theirs = sampled_by(compiled, logits, one), sampled_by(tensors, logits, one)
        assert (ours and ours.token) == (theirs and theirs.token), one
        if ours is not None and theirs is not None:
            assert_close(ours.logprobs, theirs.logprobs)


def test_equals() -> None:
    """The best of equals is the lowest; top_k keeps the equals of its last."""
    threads = threads_here()
    if threads is None:
        pytest.skip("no compiler, or a processor without AVX2")
    logits = np.array([[1, 3, 3, 2, 2, 2, 0]], np.float32)
    sampler = Sampler(threads)
    (best,) = sampler.sample(logits, [row(temperature=0.0, logit_bias={0: 0.5}, logprobs=2)])
    assert best.token == 1 and best.logprobs is not None and [token for token, _ in best.logprobs.top] == [1, 2]
    drawn = {sampler.sample(logits, [row(seed=seed, top_k=3)])[0].token for seed in range(200)}
    assert drawn == {1, 2, 3, 4, 5}


def test_beyond_float32() -> None:
    """Logits that a temperature lifts above float32's largest number are drawn without a fault: the best one comes."""
    threads = threads_here()
    if threads is None:
        pytest.skip("no compiler, or a processor without AVX2")
    logits = np.array([[1e35, 3e35, 2e35, -1e35]], np.float32)
    for filters in (
        {},
        {"top_p": 0.9},
        {"top_p": 0.9, "typical_p": 0.5},
        {"typical_p": 0.5},
        {"min_p": 0.1},
        {"top_k": 2},
    ):
        (sampled,) = Sampler(threads).sample(logits, [row(temperature=1e-4, **filters)])
        assert sampled.token == 1, filters


def test_a_forced_token_that_is_none() -> None:
    """It is an error of its row, and no read beyond the logits."""
    threads = threads_here()
    if threads is None:
        pytest.skip("no compiler, or a processor without AVX2")
    forced = dataclasses.replace(row(logprobs=1), forced=100_000)
    with pytest.raises(ValueError, match="100000 is not among the 4 of the vocabulary"):
        Sampler(threads).sample(np.zeros((1, 4), np.float32), [forced])
