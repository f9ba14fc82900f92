"""From logits to tokens where torch runs the forward: on GPUs, and in float64. What is computed, and in which order, is
what worker/sampling/sampler.py describes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch

from control.messages import TokenLogprobs
from worker.native.library import NOT_FINITE
from worker.sampling.sampler import (
    FIRST,
    GREEDY_BELOW,
    SECOND,
    STEP,
    LogitsHealth,
    NoTokenLeft,
    SampledToken,
    SamplingRow,
    describe,
    row_key,
)
from worker.tensors import sent

# The noise of worker/sampling/sampler.py for many tokens at once, by torch.


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def key_column(keys: Iterable[int], device: torch.device) -> torch.Tensor:
    """Keys of rows, [rows, 1] int64 with the same bits."""
    return sent([_signed(key) for key in keys], torch.int64, device)[:, None]


def _fold(value: torch.Tensor, bits: int) -> torch.Tensor:
    """`value ^ (value >> bits)` in place, with the logical shift that torch lacks: its own copies the sign."""
    value ^= (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
    return value


def noise_bits(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """52 random bits, for `keys` [rows, 1] and token ids [rows, n] or [n], all int64: products wrap, as they must."""
    value = keys + (tokens + 1).mul_(_signed(STEP))
    value = _fold(value, 30).mul_(_signed(FIRST))
    value = _fold(value, 27).mul_(_signed(SECOND))
    return (_fold(value, 31) >> 12).bitwise_and_((1 << 52) - 1)


def gumbel(bits: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gumbel noise of `noise_bits`; the argmax of logits + noise is distributed as softmax(logits). The large values,
    which decide, come from small numbers, so float32 is exact to 1e-5 there at a quarter of the time. Its smallest
    value may be -inf, which is never drawn."""
    # The middle of each of 2**52 intervals of (0, 1): exact in float64, and neither 0 nor 1.
    uniform = bits.to(dtype).add_(0.5).mul_(2.0**-52)
    return uniform.neg_().log1p_().neg_().log_().neg_()


# Logits processors, with the names, formulas and order of transformers'.
#
# Each function gets only the rows that ask for it. Logits are [rows, vocabulary], parameters [rows, 1].


REMOVED = float("-inf")
_LIKELIEST = 1024
"""Tokens among which a mass is looked for before the whole vocabulary is sorted."""


def column(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """One value per row, [rows, 1], of the type and on the device of `like`."""
    return sent(list(values), like.dtype, like.device)[:, None]


def positions(ids: Sequence[Iterable[int]], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and token index of each id in one list per row; ids beyond the vocabulary, never drawn, are left out."""
    each = [torch.tensor(list(row), dtype=torch.int64) for row in ids]
    counts = torch.tensor([len(row) for row in each])
    rows = torch.repeat_interleave(torch.arange(len(each)), counts)
    tokens = torch.cat(each)
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
    has_token = torch.zeros_like(logits, dtype=torch.bool)
    has_token[positions(contexts, logits)] = True
    return torch.where(has_token, torch.where(logits < 0, logits * penalties, logits / penalties), logits)


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
    table = _terms(logits.dtype, logits.device)
    vocabulary = logits.shape[-1]
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
    missing_columns = vocabulary - terms.shape[-1]
    return (
        terms[:, :vocabulary]
        if missing_columns <= 0
        else torch.nn.functional.pad(terms, (0, missing_columns), value=REMOVED)
    )


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
    nearest = distances.topk(min(_LIKELIEST, values.shape[-1]), dim=-1, largest=False)
    cumulative = probabilities.gather(-1, nearest.indices).cumsum(dim=-1)
    farthest = _reached(nearest.values, cumulative, mass)
    if flat := (cumulative[:, -1:] < mass).nonzero()[:, 0].tolist():  # the nearest are not enough
        ordered, order = distances[flat].sort(dim=-1)
        cumulative = probabilities[flat].gather(-1, order).cumsum(dim=-1)
        farthest[flat] = _reached(ordered, cumulative, mass[flat])
    return values.masked_fill(distances > farthest, REMOVED)


def _reached(distances: torch.Tensor, cumulative: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The distance [rows, 1] at which each row holds its `mass`; the last one where it never does."""
    last = (cumulative < mass).sum(dim=-1, keepdim=True).clamp(max=distances.shape[-1] - 1)
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


_HEAD = 1024
"""Tokens among which a top_p is looked for before the whole vocabulary is sorted."""
_FINALISTS = 16
"""Tokens whose score is computed in float64; the winner is among them unless as many lie within 1e-5 of each other."""


class TensorSampler:
    """Samples all rows of a step. It keeps no state between steps, not even a random generator's."""

    def launch(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor | None:
        """The tokens of `sample`, [rows] on the device of `logits`, NOT_FINITE where these are not finite, without a
        wait. None if a row needs more than an argmax."""
        if not all(row.immediate for row in rows):
            return None
        drawn = [index for index, row in enumerate(rows) if not row.greedy]
        possible = logits
        if any(row.allowed is not None for row in rows):
            _allow(possible := logits.clone(), rows)
        tokens = possible.argmax(dim=-1)
        if drawn:
            where = sent(drawn, torch.int64, logits.device)
            scaled = possible if len(drawn) == len(rows) else possible.index_select(0, where)
            tokens.index_copy_(0, where, _draw_from_all(scaled, [rows[index] for index in drawn]))
        return tokens.where(logits.isfinite().all(dim=-1), NOT_FINITE)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token for each row of `logits` [rows, vocabulary] (float32 or float64, finite; not changed). Raises
        NoTokenLeft."""
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")
        tokens = [0] * len(rows)
        if any(row.plain for row in rows):
            tokens = logits.argmax(dim=-1).tolist()
        other_rows = [index for index, row in enumerate(rows) if not row.plain]
        if other_rows:
            adjusted = _adjust(logits[other_rows], [rows[index] for index in other_rows])
            for index, token in zip(other_rows, _choose(adjusted, [rows[index] for index in other_rows]), strict=True):
                tokens[index] = token
        tokens = [token if row.forced is None else row.forced for token, row in zip(tokens, rows, strict=True)]
        logprobs = _logprobs(logits, rows, tokens)
        return [SampledToken(token, logprobs.get(index)) for index, token in enumerate(tokens)]


def _on(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    wants: Callable[[SamplingRow], bool],
    change: Callable[[torch.Tensor, list[SamplingRow]], torch.Tensor],
) -> None:
    indices = [index for index, row in enumerate(rows) if wants(row)]
    if indices:
        logits[indices] = change(logits[indices], [rows[index] for index in indices])


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply bias, penalties and masks, for greedy and drawn rows alike; `logits` are the caller's to change."""
    _on(
        logits,
        rows,
        lambda row: bool(row.sampling.logit_bias),
        lambda part, its: add_bias(part, [row.sampling.logit_bias for row in its]),
    )
    _on(
        logits,
        rows,
        lambda row: row.sampling.repetition_penalty != 1,
        lambda part, its: penalise_repetition(
            part,
            column((row.sampling.repetition_penalty for row in its), part),
            [[*row.prompt, *row.output, *row.guessed] for row in its],
        ),
    )
    _on(
        logits,
        rows,
        lambda row: row.penalised,
        lambda part, its: penalise_presence_and_frequency(
            part,
            column((row.sampling.presence_penalty for row in its), part),
            column((row.sampling.frequency_penalty for row in its), part),
            [[*row.output, *row.guessed] for row in its],
        ),
    )
    _on(
        logits,
        rows,
        lambda row: bool(row.reductions),
        lambda part, its: reduce(part, [row.reductions for row in its]),
    )
    _on(
        logits,
        rows,
        lambda row: bool(row.forbidden),
        lambda part, its: remove(part, [list(row.forbidden) for row in its]),
    )
    _on(
        logits,
        rows,
        lambda row: row.must_go_on,
        lambda part, its: remove(part, [row.sampling.stop_ids for row in its]),
    )
    _allow(logits, rows)
    _check_possible(logits, rows)
    _on(
        logits,
        rows,
        lambda row: not row.greedy and row.sampling.top_n_sigma > 0,
        lambda part, its: keep_near(part, column((row.sampling.top_n_sigma for row in its), part.to(torch.float64))),
    )
    return logits


def _check_possible(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Raise NoTokenLeft where bad words forbid every token that is possible otherwise."""
    checked = [index for index, row in enumerate(rows) if row.forbidden]
    if checked and bool((logits[checked].amax(dim=-1) == REMOVED).any()):
        raise NoTokenLeft


def _allow(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Leave constrained rows only what their grammars allow, in place; nothing is waited for."""
    masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
    if masks:
        width = max(len(mask) for mask in masks.values())
        bits = [torch.from_numpy(np.pad(mask, (0, width - len(mask)))) for mask in masks.values()]
        keep_allowed(logits, list(masks), bits)


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Argmax for greedy rows, a draw for the others, each kind of row together."""
    tokens = [0] * len(rows)
    kinds: dict[_Choose, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(_kind(row), []).append(index)
    for choose, indices in kinds.items():
        part = logits if len(indices) == len(rows) else logits[indices]
        part_tokens = choose(part, [rows[index] for index in indices])
        for index, token in zip(indices, part_tokens.tolist(), strict=True):
            tokens[index] = token
    return tokens


_Choose = Callable[[torch.Tensor, Sequence[SamplingRow]], torch.Tensor]
"""Chooses tokens [rows] from adjusted logits [rows, vocabulary]."""


def _kind(row: SamplingRow) -> _Choose:
    if row.greedy:
        return _choose_best
    if row.sampling.top_k > 0:
        return _draw_from_top_k
    return _draw_from_top_p if row.sampling.top_p < 1 else _draw_from_all


def _choose_best(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _draw_from_all(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return _draw(_apply_temperature(logits, rows), ids.expand_as(logits), rows)


def _draw_from_top_k(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    values, ids = keep_top_k(_apply_temperature(logits, rows), [row.sampling.top_k for row in rows])
    # In float64 what follows does not depend on how many columns a neighbour's top_k brought along.
    values = values.to(torch.float64)
    if any(row.sampling.top_p < 1 for row in rows):
        values = keep_top_p(values, _top_p(values, rows), values.logsumexp(dim=-1, keepdim=True))
    return _draw(values, ids, rows)


def _draw_from_top_p(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    scaled = _apply_temperature(logits, rows).to(torch.float64)
    total = scaled.logsumexp(dim=-1, keepdim=True)
    top_p = _top_p(scaled, rows)
    values, ids = scaled.topk(min(_HEAD, scaled.shape[-1]), dim=-1)
    flat = ((values - total).exp().sum(dim=-1) < top_p[:, 0]).nonzero()[:, 0].tolist()
    tokens = _draw(keep_top_p(values, top_p, total), ids, rows)
    if flat:
        values, ids = scaled[flat].sort(dim=-1, descending=True)
        remaining = keep_top_p(values, top_p[flat], total[flat])
        tokens[flat] = _draw(remaining, ids, [rows[index] for index in flat])
    return tokens


def _apply_temperature(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """A dynamic temperature is applied later."""
    return logits / column((1.0 if row.dynamic else row.sampling.temperature for row in rows), logits)


def _top_p(values: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    # Rounding may lift a sum of probabilities above 1, so a row that wants no top_p gets one out of reach.
    return column((row.sampling.top_p if row.sampling.top_p < 1 else 2.0 for row in rows), values)


def _draw(values: torch.Tensor, ids: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """One of `ids` for each row, by probabilities softmax(values)."""
    if any(row.sampling.min_p > 0 for row in rows):
        values = keep_min_p(values, column((row.sampling.min_p for row in rows), values))
    if typical := [index for index, row in enumerate(rows) if row.sampling.typical_p < 1]:
        mass = column((rows[index].sampling.typical_p for index in typical), values)
        values[typical] = keep_typical(values[typical], mass)
    values = _rescale(_exclude_top(values, rows), rows)
    keys = [row_key(row.seed, row.choice, row.position) for row in rows]
    bits = noise_bits(key_column(keys, ids.device), ids)
    if ids.shape[-1] > _FINALISTS:
        rough = values.to(torch.float32) + gumbel(bits, torch.float32)
        finalists = rough.topk(_FINALISTS, dim=-1).indices
        values, ids, bits = (each.gather(-1, finalists) for each in (values, ids, bits))
    winner = (values.to(torch.float64) + gumbel(bits)).argmax(dim=-1, keepdim=True)
    return ids.gather(-1, winner)[:, 0]


def _exclude_top(values: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The values after XTC, of the rows whose chance has come."""
    excluding = [index for index, row in enumerate(rows) if row.excludes]
    if not excluding:
        return values
    values = values.to(torch.float64)
    thresholds = column((rows[index].sampling.xtc_threshold for index in excluding), values)
    values[excluding] = exclude_top(values[excluding], thresholds)
    return values


def _rescale(values: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The values divided by their dynamic temperatures, of the rows that have one; a very low one leaves the best."""
    dynamic = [index for index, row in enumerate(rows) if row.dynamic]
    if not dynamic:
        return values
    values = values.to(torch.float64)
    part = values[dynamic]
    temperatures = dynamic_temperatures(
        part,
        column((rows[index].temperatures[0] for index in dynamic), part),
        column((rows[index].temperatures[1] for index in dynamic), part),
        column((rows[index].sampling.dynatemp_exponent for index in dynamic), part),
        column((rows[index].sampling.temperature for index in dynamic), part),
    )
    best = part.amax(dim=-1, keepdim=True)
    cold = temperatures < GREEDY_BELOW
    scaled = part / temperatures.masked_fill(cold, 1.0)
    values[dynamic] = scaled.masked_fill(cold & (part < best), REMOVED)
    return values


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: list[int]) -> dict[int, TokenLogprobs]:
    """Log probabilities by row index, of those rows that want them."""
    counts = {index: row.sampling.logprobs for index, row in enumerate(rows) if row.sampling.logprobs is not None}
    if not counts:
        return {}
    indices = list(counts)
    logarithms = logits[indices].log_softmax(dim=-1)
    token_logarithms = logarithms.gather(-1, torch.tensor([[tokens[index]] for index in indices], device=logits.device))
    best = logarithms.topk(min(max(counts.values()), logits.shape[-1]), dim=-1)
    rows_of = zip(
        counts.items(), token_logarithms[:, 0].tolist(), best.indices.tolist(), best.values.tolist(), strict=True
    )
    return {
        index: TokenLogprobs(logarithm, list(zip(ids[:count], values[:count], strict=True)))
        for (index, count), logarithm, ids, values in rows_of
    }


class TensorLogits:
    """Logits [rows, vocabulary] of torch's, on any device. On a GPU their tokens may be under way, and the host has not
    waited for them."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._sampler = TensorSampler()
        self._arriving: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self.on_device: torch.Tensor | None = None
        """The tokens where only the device has them."""

    def launch(self, rows: list[SamplingRow]) -> None:
        """Launch the sampling of all rows on the device; nothing where a row needs another way."""
        launched = self._sampler.launch(self._logits, rows)
        if launched is None:
            return
        # The copy goes before whatever is launched next, and only the copy is waited for.
        self._arriving = launched.to("cpu", non_blocking=True)
        if launched.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()
        self.on_device = launched

    def arrived(self) -> list[int] | None:
        """The tokens that were launched, once the host has them; None if none were."""
        if self._arriving is None:
            return None
        if self._event is not None:
            self._event.synchronize()
        return self._arriving.tolist()

    def inspect(self) -> dict[int, LogitsHealth]:
        """Reports of those rows that are not finite throughout, by row index. A healthy batch costs one reduction, as a
        sum with NaN or infinity in it is not finite."""
        logits = self._logits
        suspects = (~logits.sum(dim=-1).isfinite()).nonzero()[:, 0].tolist()
        # A sum of finite numbers may overflow, so the sum alone is no proof.
        sick = [row for row in suspects if not bool(logits[row].isfinite().all())]
        return {row: describe(logits[row].cpu().numpy()) for row in sick}

    def sample(self, indices: list[int], rows: list[SamplingRow]) -> list[SampledToken]:
        """A token for each of the rows `indices`. Raises NoTokenLeft."""
        logits = self._logits if len(indices) == len(self._logits) else self._logits[indices]
        return self._sampler.sample(logits, rows)
