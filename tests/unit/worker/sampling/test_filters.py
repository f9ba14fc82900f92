"""Filters of logits equal transformers': each, and all of them in a row."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from worker.sampling.torch import sampler

VOCABULARY = 300
REMOVED = float("-inf")


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def logits(request: pytest.FixtureRequest) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, VOCABULARY, dtype=request.param, generator=generator) * 3


def per_row(logits: torch.Tensor, processors: list[object], ids: list[list[int]] | None = None) -> torch.Tensor:
    """transformers' result, one processor per row."""
    rows = []
    for row, processor in enumerate(processors):
        context = torch.tensor([ids[row] if ids else [0]])
        rows.append(processor(context, logits[row : row + 1].clone()))  # type: ignore[operator]
    return torch.cat(rows)


def scattered(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Values in the order of their ids."""
    return torch.full((values.shape[0], VOCABULARY), REMOVED, dtype=values.dtype).scatter(-1, ids, values)


def total(values: torch.Tensor) -> torch.Tensor:
    return values.logsumexp(dim=-1, keepdim=True)


def contexts(rows: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(VOCABULARY, (3 + 9 * row,), generator=generator).tolist() for row in range(rows)]


def test_repetition_penalty_equals_transformers(logits: torch.Tensor) -> None:
    """Each row's own penalty over its own context equals transformers', also below 1."""
    penalties, ids = [1.1, 1.3, 2.0, 0.7, 1.0, 1.05], contexts(6)
    expected = per_row(logits, [RepetitionPenaltyLogitsProcessor(penalty) for penalty in penalties], ids)
    result = sampler.penalise_repetition(logits, sampler.column(penalties, logits), ids)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_bias_equals_transformers(logits: torch.Tensor) -> None:
    """logit_bias equals transformers' sequence_bias of single tokens; ids beyond the vocabulary change nothing."""
    biases = [{5: 2.5, 7: -100.0}, {0: 1.0}, {299: -3.0}, {1: 0.5, 2: 0.5}, {4: 9.0}, {8: -1.0}]
    expected = per_row(
        logits, [SequenceBiasLogitsProcessor([[[token], bias] for token, bias in row.items()]) for row in biases]
    )
    torch.testing.assert_close(sampler.add_bias(logits, biases), expected)
    assert torch.equal(sampler.add_bias(logits, [{VOCABULARY: 5.0, -1: 5.0}] * 6), logits)


def test_presence_and_frequency_follow_openais_formula(logits: torch.Tensor) -> None:
    """Each output token loses presence once and frequency for each time, by OpenAI's formula."""
    outputs = contexts(6)
    presence, frequency = [0.5, -1.0, 0.0, 2.0, 1.0, 0.1], [0.0, 0.3, 1.5, -0.5, 1.0, 0.2]
    expected = logits.clone()
    for row, output in enumerate(outputs):
        for token in set(output):
            expected[row, token] -= presence[row] + frequency[row] * output.count(token)
    result = sampler.penalise_presence_and_frequency(
        logits, sampler.column(presence, logits), sampler.column(frequency, logits), outputs
    )
    torch.testing.assert_close(result, expected)


def test_stop_ids_are_removed(logits: torch.Tensor) -> None:
    """Removed ids equal what transformers does before min_new_tokens."""
    processor = MinNewTokensLengthLogitsProcessor(prompt_length_to_skip=1, min_new_tokens=5, eos_token_id=[3, 250])
    expected = processor(torch.zeros(6, 3, dtype=torch.int64), logits)
    assert torch.equal(sampler.remove(logits, [[3, 250, VOCABULARY + 9]] * 6), expected)


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "with equals"])
def test_top_k_equals_transformers(logits: torch.Tensor, coarse: bool) -> None:
    """Rows of different top_k keep what transformers keeps, also where several tokens equal the last one kept."""
    if coarse:
        logits = logits.round()
    top_k = [1, 2, 5, 40, VOCABULARY, 10_000]
    expected = per_row(logits, [TopKLogitsWarper(k) for k in top_k])
    assert torch.equal(scattered(*sampler.keep_top_k(logits, top_k)), expected)


def test_top_p_equals_transformers(logits: torch.Tensor) -> None:
    """Rows of different top_p keep what transformers keeps; a tiny one keeps the best."""
    top_p = [1e-9, 0.1, 0.5, 0.9, 0.95, 0.999]
    expected = per_row(logits, [TopPLogitsWarper(p) for p in top_p])
    values, ids = logits.sort(dim=-1, descending=True)
    assert torch.equal(
        scattered(sampler.keep_top_p(values, sampler.column(top_p, logits), total(values)), ids), expected
    )


def test_min_p_equals_transformers(logits: torch.Tensor) -> None:
    """Rows of different min_p keep what transformers keeps; 1 keeps the best."""
    min_p = [1e-6, 0.01, 0.05, 0.1, 0.5, 1.0]
    expected = per_row(logits, [MinPLogitsWarper(p) for p in min_p])
    assert torch.equal(sampler.keep_min_p(logits, sampler.column(min_p, logits)), expected)


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "with equals"])
def test_typical_p_equals_transformers(logits: torch.Tensor, coarse: bool) -> None:
    """Rows of different masses keep what transformers keeps; where a token is impossible already, too."""
    if coarse:
        logits = logits.round()
    logits = logits.masked_fill(logits < -2, REMOVED)
    mass = [1e-9, 0.1, 0.2, 0.5, 0.95, 0.999]
    expected = per_row(logits.double(), [TypicalLogitsWarper(one) for one in mass]).to(logits.dtype)
    assert torch.equal(sampler.keep_typical(logits, sampler.column(mass, logits)), expected)
    assert (sampler.keep_typical(logits, sampler.column([0.0] * 6, logits)) > REMOVED).any(-1).all()


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(20, 0.9, 0.05), (50, 0.3, 0.01), (7, 0.99, 0.2)])
def test_all_in_a_row(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Penalty, temperature, top_k, top_p and min_p together keep the same tokens with the same logits."""
    ids = contexts(6)
    chain = [RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.7)]
    chain += [TopKLogitsWarper(top_k), TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]
    expected = per_row(logits, [LogitsProcessorList(chain)] * 6, ids)
    ours = sampler.penalise_repetition(logits, sampler.column([1.2] * 6, logits), ids) / 0.7
    values, kept = sampler.keep_top_k(ours, [top_k] * 6)
    values = sampler.keep_top_p(values, sampler.column([top_p] * 6, logits), total(values))
    values = sampler.keep_min_p(values, sampler.column([min_p] * 6, logits))
    torch.testing.assert_close(scattered(values, kept), expected)
