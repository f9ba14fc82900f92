"""Logits processors, with the names, formulas and order of transformers'.

Each function gets only the rows that ask for it. Logits are [rows, vocabulary], parameters [rows, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from worker.engine.torch.transfer import sent

REMOVED = float("-inf")
_HEAD = 1024
"""Tokens among which a mass is looked for before the whole vocabulary is sorted."""


def column(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """One value per row, [rows, 1], of the type and on the device of `like`."""
    return sent(list(values), like.dtype, like.device)[:, None]


def positions(ids: Sequence[Iterable[int]], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token index of each id in one list per row; ids beyond the vocabulary, never drawn, are left out."""
    each = [torch.tensor(list(row), dtype=torch.int64) for row in ids]
    counts = torch.tensor([len(row) for row in each])
    rows, tokens = torch.repeat_interleave(torch.arange(len(each)), counts), torch.cat(each)
    present = (tokens >= 0) & (tokens < logits.shape[-1])
    return rows[present].to(logits.device), tokens[present].to(logits.device)


def add_bias(logits: torch.Tensor, biases: Sequence[dict[int, float]]) -> torch.Tensor:
    """OpenAI's logit_bias: a number to add to single logits."""
    vocabulary = logits.shape[-1]
    valid = [{token: bias for token, bias in row.items() if 0 <= token < vocabulary} for row in biases]
    values = torch.tensor([bias for row in valid for bias in row.values()], dtype=logits.dtype, device=logits.device)
    return logits.index_put(positions(valid, logits), values, accumulate=True)


def penalise_repetition(
    logits: torch.Tensor, penalties: torch.Tensor, contexts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Divide positive and multiply negative logits of every token in prompt or output (CTRL, Keskar et al. 2019)."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[positions(contexts, logits)] = True
    return torch.where(seen, torch.where(logits < 0, logits * penalties, logits / penalties), logits)


def penalise_presence_and_frequency(
    logits: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor, outputs: Sequence[Sequence[int]]
) -> torch.Tensor:
    """OpenAI's penalties: `presence` once for a token in the output, `frequency` for each time it is there."""
    where = positions(outputs, logits)
    ones = torch.ones((), dtype=logits.dtype, device=logits.device)
    counts = torch.zeros_like(logits).index_put_(where, ones, accumulate=True)
    return logits - counts * frequency - (counts > 0) * presence


def remove(logits: torch.Tensor, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    return logits.index_put(positions(ids, logits), torch.tensor(REMOVED, dtype=logits.dtype, device=logits.device))


def keep_allowed(logits: torch.Tensor, rows: Sequence[int], allowed: Sequence[torch.Tensor]) -> None:
    """In each of `rows`, remove in place the tokens that are not in `allowed` [bytes] uint8, a bit per token, the
    lowest of a byte first. Adding a table's entry for each byte takes a tenth of a fill by mask."""
    table, vocabulary = _terms(logits.dtype, logits.device), logits.shape[-1]
    if logits.is_cuda:
        where = sent(rows, torch.int64, logits.device)
        bits = torch.stack(list(allowed)).to(logits.device, non_blocking=True)
        logits.index_add_(0, where, _widened(table[bits.int()].flatten(1), vocabulary))
    else:  # row by row, so that what is added never leaves the cache
        for row, bits in zip(rows, allowed, strict=True):
            logits[row].add_(_widened(table.index_select(0, bits.int()).flatten()[None], vocabulary)[0])


@lru_cache
def _terms(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 8]: for each byte what its bits add to eight logits, nothing or minus infinity."""
    bits = torch.arange(256)[:, None].bitwise_right_shift(torch.arange(8)).bitwise_and(1)
    return torch.zeros(256, 8, dtype=dtype).masked_fill(bits == 0, REMOVED).to(device)


def _widened(terms: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`terms` [rows, …] as wide as the vocabulary; what had no bit is impossible."""
    missing = vocabulary - terms.shape[-1]
    return terms[:, :vocabulary] if missing <= 0 else torch.nn.functional.pad(terms, (0, missing), value=REMOVED)


def keep_top_k(logits: torch.Tensor, top_k: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (others removed) and ids of each row's `top_k` best, best first; ties with the last of them stay. The
    result has as many columns as the row with most of them needs."""
    vocabulary = logits.shape[-1]
    counts = torch.tensor([min(k, vocabulary) for k in top_k], device=logits.device)[:, None]
    best = logits.topk(min(max(top_k), vocabulary), dim=-1)
    threshold = best.values.gather(-1, counts - 1)
    # A row may have fewer than `top_k` that are possible; the impossible ones are equals in their thousands.
    columns = max(1, int(((logits >= threshold) & (logits > REMOVED)).sum(dim=-1).max()))
    if columns > best.values.shape[-1]:
        best = logits.topk(columns, dim=-1)
    return best.values.masked_fill(best.values < threshold, REMOVED), best.indices


def keep_top_p(values: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Keep the fewest best that hold `top_p` of the probability, one at least; `values` are sorted, best first. `total`
    [rows, 1] is the logsumexp of all logits, of which `values` may be the head only."""
    probabilities = (values - total).exp()
    better = probabilities.cumsum(dim=-1) - probabilities
    removed = better >= top_p
    removed[:, 0] = False
    return values.masked_fill(removed, REMOVED)


def keep_typical(values: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose information is nearest to the entropy until they hold `mass` of the probability, one at
    least; ties with the last of them stay (locally typical sampling, Meister et al. 2022)."""
    logprobs = values.to(torch.float64).log_softmax(dim=-1)
    probabilities = logprobs.exp()
    entropy = -(probabilities * logprobs).nansum(dim=-1, keepdim=True)
    distances = (-logprobs - entropy).abs()
    nearest = distances.topk(min(_HEAD, values.shape[-1]), dim=-1, largest=False)
    held = probabilities.gather(-1, nearest.indices).cumsum(dim=-1)
    farthest = _reached(nearest.values, held, mass)
    if flat := (held[:, -1:] < mass).nonzero()[:, 0].tolist():  # the nearest are not enough
        ordered, order = distances[flat].sort(dim=-1)
        held = probabilities[flat].gather(-1, order).cumsum(dim=-1)
        farthest[flat] = _reached(ordered, held, mass[flat])
    return values.masked_fill(distances > farthest, REMOVED)


def _reached(distances: torch.Tensor, held: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The distance [rows, 1] at which each row holds its `mass`; the last one where it never does."""
    last = (held < mass).sum(dim=-1, keepdim=True).clamp(max=distances.shape[-1] - 1)
    return distances.gather(-1, last)


def keep_min_p(values: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Remove what is less probable than `min_p` times the most probable token."""
    probabilities = values.softmax(dim=-1)
    removed = probabilities < min_p * probabilities.amax(dim=-1, keepdim=True)
    return values.masked_fill(removed & (values < values.amax(dim=-1, keepdim=True)), REMOVED)


def reduce(logits: torch.Tensor, reductions: Sequence[Mapping[int, float]]) -> torch.Tensor:
    """Take a number from single logits."""
    return add_bias(logits, [{token: -value for token, value in row.items()} for row in reductions])


def keep_near(logits: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    """Remove what is farther below the best than so many standard deviations of all that is possible (top-nσ, Tang et
    al. 2024)."""
    values = logits.to(torch.float64)
    possible = values > REMOVED
    count = possible.sum(dim=-1, keepdim=True)
    mean = values.masked_fill(~possible, 0).sum(dim=-1, keepdim=True) / count
    squares = (values - mean).square().masked_fill(~possible, 0).sum(dim=-1, keepdim=True)
    least = values.amax(dim=-1, keepdim=True) - deviations * (squares / count).sqrt()
    return logits.masked_fill(values < least, REMOVED)


def exclude_top(values: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Of the tokens whose probability reaches the threshold leave only the least probable ones (XTC)."""
    probabilities = values.softmax(dim=-1)
    least = values.masked_fill(probabilities < thresholds, float("inf")).amin(dim=-1, keepdim=True)
    return values.masked_fill(values > least, REMOVED)


def dynamic_temperatures(
    values: torch.Tensor, coldest: torch.Tensor, hottest: torch.Tensor, exponents: torch.Tensor, fixed: torch.Tensor
) -> torch.Tensor:
    """Temperatures [rows, 1] between the coldest and the hottest, by the part that the entropy has of the most that it
    can be; `fixed` where one token is left."""
    logprobs = values.log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).nansum(dim=-1, keepdim=True)
    counts = (values > REMOVED).sum(dim=-1, keepdim=True)
    part = (entropy / counts.to(values.dtype).log()).clamp(0, 1)
    return torch.where(counts < 2, fixed, coldest + (hottest - coldest) * part.pow(exponents))
