"""The sampler gives a row the same token in every batch: the right distribution, and every parameter honoured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

from control.messages import Sampling
from worker.native.library import threads_here
from worker.sampling.sampler import NoTokenLeft, SampledToken, Sampler, SamplingRow, row_key
from worker.sampling.torch.sampler import TensorSampler, gumbel, key_column, noise_bits

VOCABULARY = 200
PROMISED = [126, 179, 199, 135, 173, 104]


Sample = Callable[[torch.Tensor, list[SamplingRow]], list[SampledToken]]


@pytest.fixture(scope="module", params=["torch", "C++"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Tokens for rows of logits, by either sampler."""
    if request.param == "torch":
        return TensorSampler().sample
    threads = threads_here()
    if threads is None:
        pytest.skip("no compiler, or a processor without AVX2")
    return lambda logits, rows: Sampler(threads).sample(logits.float().contiguous().numpy(), rows)


def row(
    *,
    seed: int = 1,
    choice: int = 0,
    position: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    forbidden: Sequence[int] = (),
    reductions: Mapping[int, float] | None = None,
    **sampling: Any,
) -> SamplingRow:
    return SamplingRow(
        sampling=Sampling(**({"max_tokens": 10} | sampling)),
        seed=seed,
        choice=choice,
        position=position,
        prompt=prompt or [1, 2],
        output=output or [],
        forbidden=forbidden,
        reductions=reductions or {},
    )


def tokens(sample: Sample, logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return [sampled.token for sampled in sample(logits, rows)]


rows_of_all_kinds = st.lists(
    st.builds(
        row,
        seed=st.integers(0, 2**64 - 1),
        choice=st.integers(0, 3),
        position=st.integers(0, 5),
        prompt=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        output=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_p=st.sampled_from([1.0, 0.9, 0.2]),
        top_k=st.sampled_from([0, 1, 5, 50, 1000]),
        min_p=st.sampled_from([0.0, 0.1]),
        typical_p=st.sampled_from([1.0, 0.9, 0.2]),
        top_n_sigma=st.sampled_from([0.0, 1.0]),
        xtc_probability=st.sampled_from([0.0, 0.5]),
        dynatemp_range=st.sampled_from([0.0, 0.5]),
        reductions=st.sampled_from([{}, {3: 2.0, VOCABULARY + 5: 1.0}]),
        forbidden=st.sampled_from([(), (3, 7, VOCABULARY + 5)]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        logit_bias=st.sampled_from([{}, {3: 5.0}]),
        min_tokens=st.sampled_from([0, 3]),
        stop_ids=st.sampled_from([[], [0, 3]]),
        logprobs=st.sampled_from([None, 0, 3]),
    ),
    min_size=1,
    max_size=8,
)


@given(rows=rows_of_all_kinds, seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=50)
def test_a_row_does_not_feel_its_neighbours(
    sample: Sample, rows: list[SamplingRow], seed: int, dtype: torch.dtype
) -> None:
    """Alone, in a batch and in the reversed batch a row gets the same token; the logits are not changed."""
    logits = torch.randn(len(rows), VOCABULARY, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before)
    assert sample(logits.flip(0), rows[::-1]) == together[::-1]
    for index, each in enumerate(rows):
        assert sample(logits[index : index + 1], [each]) == [together[index]]


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
@pytest.mark.parametrize("sampling", [{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.5}])
def test_tokens_have_the_distribution_of_the_softmax(sample: Sample, varied: str, sampling: dict[str, Any]) -> None:
    """Over seeds, choices or positions tokens come as often as the filtered softmax says."""
    draws = 5_000
    raw = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 1.2], dtype=torch.float64)
    kept = raw / sampling.get("temperature", 1.0)
    if "top_k" in sampling:
        kept[kept < kept.topk(5).values[-1]] = -math.inf
    if "top_p" in sampling:
        order = kept.softmax(-1).sort(descending=True)
        fewest = int((order.values.cumsum(-1) < 0.8).sum()) + 1
        kept[order.indices[fewest:]] = -math.inf
    rows = [row(**{varied: index}, **sampling) for index in range(draws)]
    counts = torch.bincount(torch.tensor(tokens(sample, raw.expand(draws, -1), rows)), minlength=len(raw)).double()
    possible = kept > -math.inf
    assert counts[~possible].sum() == 0
    # The 99.9 % point of chi square with 7 degrees of freedom; fewer tokens only make it stricter to miss.
    assert chi_square(counts[possible], kept.softmax(-1)[possible]) < 24.3


def test_noise_does_not_drift(sample: Sample) -> None:
    """Seeds keep their meaning over releases: these tokens are part of the promise to continue a stream exactly."""
    logits = torch.linspace(0, 3, VOCABULARY).expand(6, -1)
    rows = [row(seed=2**64 - 1, position=position) for position in range(6)]
    assert tokens(sample, logits, rows) == PROMISED


FILTERED = [
    *({}, {"top_p": 0.9}, {"top_p": 0.9999}, {"min_p": 0.01}),
    *({"typical_p": 0.9}, {"typical_p": 0.2}, {"top_p": 0.9, "typical_p": 0.5}, {"min_p": 0.01, "typical_p": 0.95}),
]


@given(seed=st.integers(0, 10_000), sampling=st.sampled_from(FILTERED))
@settings(max_examples=60)
def test_shortcuts_change_nothing(sample: Sample, seed: int, sampling: dict[str, Any]) -> None:
    """Over a large vocabulary the token is the argmax of all filtered logits plus exact noise."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 5_000, generator=generator, dtype=torch.float64) * (1 + seed % 4)
    kept = logits
    warpers = {"top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper, "typical_p": TypicalLogitsWarper}
    for name, warper in warpers.items():
        kept = warper(sampling[name])(None, kept) if name in sampling else kept
    noise = gumbel(noise_bits(key_column([row_key(seed, 0, 3)], torch.device("cpu")), torch.arange(5_000)))
    assert tokens(sample, logits, [row(seed=seed, position=3, **sampling)]) == [int((kept + noise).argmax())]


EVENLY = [4.0, 3.0, 2.5, 1.0, 0.0, -1.0, -9.0, -9.5]
"""Logits for the samplers of llama.cpp."""


def drawn(sample: Sample, **sampling: Any) -> set[int]:
    """The tokens that come in many draws."""
    return set(
        tokens(sample, torch.tensor([EVENLY]).expand(400, -1), [row(seed=seed, **sampling) for seed in range(400)])
    )


def test_top_n_sigma_keeps_what_is_near_the_best(sample: Sample) -> None:
    """Within so many standard deviations of the possible logits, at any temperature; a greedy row is as before."""
    deviation = float(np.std(EVENLY))
    assert drawn(sample, top_n_sigma=0.5, temperature=5.0) == {
        token for token, value in enumerate(EVENLY) if value >= EVENLY[0] - 0.5 * deviation
    }
    assert drawn(sample, temperature=5.0) > drawn(sample, top_n_sigma=0.5, temperature=5.0)
    assert drawn(sample, top_n_sigma=0.5, temperature=0.0) == {0}
    # Impossible tokens are no part of the deviation.
    few = np.array([0b00000111], dtype=np.uint8)
    constrained = [
        dataclasses.replace(row(seed=seed, top_n_sigma=1.0, temperature=5.0), allowed=few) for seed in range(400)
    ]
    assert set(tokens(sample, torch.tensor([EVENLY]).expand(400, -1), constrained)) == {0}


def test_xtc_leaves_out_the_likely_ones_at_its_chance(sample: Sample) -> None:
    """Of the tokens at the threshold only the least likely one stays, and those below; the chance is the row's own."""
    probabilities = torch.tensor(EVENLY).softmax(-1)
    above = [token for token in range(len(EVENLY)) if probabilities[token] >= 0.1]
    assert above == [0, 1, 2]
    assert drawn(sample, xtc_probability=1.0, xtc_threshold=0.1, min_p=0.01) == {2, 3, 4}
    assert drawn(sample, xtc_probability=1.0, xtc_threshold=0.55) >= {0, 1}
    assert drawn(sample, xtc_probability=1.0, xtc_threshold=0.5) >= {0, 1}
    assert drawn(sample, xtc_probability=1.0, temperature=0.0) == {0}
    logits = torch.tensor([EVENLY]).expand(1000, -1)
    half = tokens(sample, logits, [row(seed=seed, xtc_probability=0.5, xtc_threshold=0.1) for seed in range(1000)])
    whole = tokens(sample, logits, [row(seed=seed) for seed in range(1000)])
    best = sum(token == 0 for token in half) / sum(token == 0 for token in whole)
    assert 0.4 < best < 0.6


def test_a_dynamic_temperature_follows_the_entropy(sample: Sample) -> None:
    """As llama.cpp's formula has it, over the tokens that the filters leave; a single one is drawn anyway."""
    raw = torch.tensor([EVENLY], dtype=torch.float64)
    for kept in (len(EVENLY), 4):
        left = raw[0, :kept].log_softmax(-1)
        part = float(-(left.exp() * left).sum()) / math.log(kept)
        temperature = 0.2 + (1.8 - 0.2) * part**2.0
        noise = [
            gumbel(noise_bits(key_column([row_key(seed, 0, 0)], torch.device("cpu")), torch.arange(kept)))
            for seed in range(200)
        ]
        expected = [int((raw[0, :kept] / temperature + one).argmax()) for one in noise]
        rows = [row(seed=seed, dynatemp_range=0.8, dynatemp_exponent=2.0, top_k=kept % 8) for seed in range(200)]
        assert tokens(sample, raw.expand(200, -1), rows) == expected
    assert drawn(sample, dynatemp_range=1.0, top_k=1) == {0}
    # A range below 0 ends at 0: what is certain becomes greedy.
    certain = torch.tensor([[50.0, 0.0, 0.0]]).expand(50, -1)
    rows = [row(seed=seed, temperature=0.5, dynatemp_range=1.0) for seed in range(50)]
    assert set(tokens(sample, certain, rows)) == {0}


def test_reductions_are_taken_from_their_tokens(sample: Sample) -> None:
    """From drawn and greedy rows, whatever size they have; log probabilities are those without them."""
    logits = torch.tensor([[3.0, 2.5, 2.0, 0.0]])
    (sampled,) = sample(logits, [row(temperature=0.0, reductions={0: 0.6, 1: 1e30, 9: 1.0}, logprobs=1)])
    assert sampled.token == 0 or sampled.token == 2
    assert sampled.token == 0 and sampled.logprobs is not None and sampled.logprobs.top[0][0] == 0
    (sampled,) = sample(logits, [row(temperature=0.0, reductions={0: 1.1, 1: 1e30})])
    assert sampled.token == 2


def test_choices_of_one_request_differ(sample: Sample) -> None:
    """n choices with one seed are different draws."""
    logits = torch.zeros(4, VOCABULARY)
    assert len(set(tokens(sample, logits, [row(choice=choice) for choice in range(4)]))) > 1


def test_greedy_obeys_bias_penalties_and_min_tokens(sample: Sample) -> None:
    """Temperature 0 takes the best token after bias, penalties and masks."""
    logits = torch.tensor([[3.0, 2.5, 2.0, 0.0]]).expand(6, -1)
    greedy = [
        row(temperature=0.0),
        row(temperature=0.0, logit_bias={3: 4.0}),
        row(temperature=0.0, repetition_penalty=2.0, prompt=[0], output=[1]),
        row(temperature=0.0, presence_penalty=0.6, output=[0]),
        row(temperature=0.0, frequency_penalty=0.6, output=[0, 0, 1]),
        row(temperature=0.0, min_tokens=1, stop_ids=[0]),
    ]
    assert tokens(sample, logits, greedy) == [0, 3, 2, 1, 2, 1]


def test_typical_p_does_not_change_greedy_rows(sample: Sample) -> None:
    """As in transformers, whose warpers are for drawn tokens: the best token is far from typical here."""
    logits = torch.tensor([[2.0] + [0.0] * 100])
    assert tokens(sample, logits, [row(temperature=0.0, typical_p=0.1)]) == [0]
    assert 0 not in tokens(sample, logits.expand(50, -1), [row(seed=seed, typical_p=0.1) for seed in range(50)])


def test_forbidden_tokens_are_never_chosen(sample: Sample) -> None:
    """Greedy or drawn, beside a grammar too; log probabilities are those without it. No token left is an error."""
    logits = torch.tensor([[9.0, 1.0, 8.0, 0.0]])
    rows = [row(temperature=0.0, forbidden=[0], logprobs=1), *(row(seed=seed, forbidden=[0, 2]) for seed in range(40))]
    sampled = sample(logits.expand(41, -1), rows)
    assert sampled[0].token == 2
    assert sampled[0].logprobs is not None and sampled[0].logprobs.top[0][0] == 0
    assert {one.token for one in sampled[1:]} == {1, 3}
    even = np.array([0b0101], dtype=np.uint8)
    constrained = dataclasses.replace(row(temperature=0.0, forbidden=[0]), allowed=even)
    assert tokens(sample, logits, [constrained]) == [2]
    with pytest.raises(NoTokenLeft):
        tokens(sample, logits, [dataclasses.replace(constrained, forbidden=[0, 2])])


def test_stop_ids_return_after_min_tokens(sample: Sample) -> None:
    """From position min_tokens on a stop id can be drawn again."""
    logits = torch.tensor([[5.0, 1.0]]).expand(3, -1)
    rows = [row(temperature=0.0, min_tokens=2, stop_ids=[0], position=position) for position in range(3)]
    assert tokens(sample, logits, rows) == [1, 1, 0]


def test_tiny_temperature_is_greedy(sample: Sample) -> None:
    """A temperature by which float32 would overflow is greedy instead of not a number."""
    logits = torch.tensor([[1e3, 2e3, -1e38]])
    assert tokens(sample, logits, [row(temperature=1e-9)]) == [1]


def test_logprobs_are_those_of_the_raw_logits(sample: Sample) -> None:
    """Bias and temperature move the token, never the log probabilities; the best ones come in order."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]]).expand(3, -1)
    biased = row(temperature=0.5, logit_bias={0: 100.0}, logprobs=2)
    sampled = sample(logits, [biased, row(logprobs=0), row()])
    raw = logits[0].log_softmax(-1).tolist()
    assert sampled[0].token == 0
    assert sampled[0].logprobs is not None
    assert sampled[0].logprobs.chosen == pytest.approx(raw[0])
    assert sampled[0].logprobs.top == [(3, pytest.approx(raw[3])), (2, pytest.approx(raw[2]))]
    assert sampled[1].logprobs is not None and sampled[1].logprobs.top == []
    assert sampled[2].logprobs is None


def test_more_logprobs_than_tokens(sample: Sample) -> None:
    """More log probabilities than there are tokens are as many as there are."""
    (sampled,) = sample(torch.tensor([[0.0, 1.0]]), [row(logprobs=20)])
    assert sampled.logprobs is not None and len(sampled.logprobs.top) == 2


def test_rows_and_logits_must_agree(sample: Sample) -> None:
    """Another number of rows than of logits is refused with both."""
    with pytest.raises(ValueError, match=r"\(2, 5\) for 1 rows"):
        sample(torch.zeros(2, 5), [row()])
