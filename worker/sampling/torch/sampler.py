"""From logits to tokens where torch runs the forward: on GPUs, and in float64. What is computed, and in which order, is
what worker/sampling/sampler.py describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from control.messages import TokenLogprobs
from worker.engine.torch.transfer import sent
from worker.native.library import NOT_FINITE
from worker.sampling.noise import row_key
from worker.sampling.sampler import GREEDY_BELOW, LogitsHealth, NoTokenLeft, Sampled, SamplingRow, describe
from worker.sampling.torch import filters
from worker.sampling.torch.noise import gumbel, key_column, noise_bits

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

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[Sampled]:
        """One token for each row of `logits` [rows, vocabulary] (float32 or float64, finite; not changed). Raises
        NoTokenLeft."""
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")
        tokens = [0] * len(rows)
        if any(row.plain for row in rows):
            tokens = logits.argmax(dim=-1).tolist()
        others = [index for index, row in enumerate(rows) if not row.plain]
        if others:
            adjusted = _adjust(logits[others], [rows[index] for index in others])
            for index, token in zip(others, _choose(adjusted, [rows[index] for index in others]), strict=True):
                tokens[index] = token
        tokens = [token if row.forced is None else row.forced for token, row in zip(tokens, rows, strict=True)]
        logprobs = _logprobs(logits, rows, tokens)
        return [Sampled(token, logprobs.get(index)) for index, token in enumerate(tokens)]


def _on(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    wants: Callable[[SamplingRow], bool],
    change: Callable[[torch.Tensor, list[SamplingRow]], torch.Tensor],
) -> None:
    chosen = [index for index, row in enumerate(rows) if wants(row)]
    if chosen:
        logits[chosen] = change(logits[chosen], [rows[index] for index in chosen])


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply bias, penalties and masks, for greedy and drawn rows alike; `logits` are the caller's to change."""
    _on(
        logits,
        rows,
        lambda row: bool(row.sampling.logit_bias),
        lambda part, its: filters.add_bias(part, [row.sampling.logit_bias for row in its]),
    )
    _on(
        logits,
        rows,
        lambda row: row.sampling.repetition_penalty != 1,
        lambda part, its: filters.penalise_repetition(
            part,
            filters.column((row.sampling.repetition_penalty for row in its), part),
            [[*row.prompt, *row.output, *row.guessed] for row in its],
        ),
    )
    _on(
        logits,
        rows,
        lambda row: row.penalised,
        lambda part, its: filters.penalise_presence_and_frequency(
            part,
            filters.column((row.sampling.presence_penalty for row in its), part),
            filters.column((row.sampling.frequency_penalty for row in its), part),
            [[*row.output, *row.guessed] for row in its],
        ),
    )
    _on(
        logits,
        rows,
        lambda row: bool(row.reductions),
        lambda part, its: filters.reduce(part, [row.reductions for row in its]),
    )
    _on(
        logits,
        rows,
        lambda row: bool(row.forbidden),
        lambda part, its: filters.remove(part, [list(row.forbidden) for row in its]),
    )
    _on(
        logits,
        rows,
        lambda row: row.must_go_on,
        lambda part, its: filters.remove(part, [row.sampling.stop_ids for row in its]),
    )
    _allow(logits, rows)
    _check_possible(logits, rows)
    _on(
        logits,
        rows,
        lambda row: not row.greedy and row.sampling.top_n_sigma > 0,
        lambda part, its: filters.keep_near(
            part, filters.column((row.sampling.top_n_sigma for row in its), part.to(torch.float64))
        ),
    )
    return logits


def _check_possible(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Raise NoTokenLeft where bad words forbid every token that is possible otherwise."""
    checked = [index for index, row in enumerate(rows) if row.forbidden]
    if checked and bool((logits[checked].amax(dim=-1) == filters.REMOVED).any()):
        raise NoTokenLeft


def _allow(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Leave constrained rows only what their grammars allow, in place; nothing is waited for."""
    masks = {index: row.allowed for index, row in enumerate(rows) if row.allowed is not None}
    if masks:
        width = max(len(mask) for mask in masks.values())
        bits = [torch.from_numpy(np.pad(mask, (0, width - len(mask)))) for mask in masks.values()]
        filters.keep_allowed(logits, list(masks), bits)


def _choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Argmax for greedy rows, a draw for the others, each kind of row together."""
    tokens = [0] * len(rows)
    kinds: dict[_Choose, list[int]] = {}
    for index, row in enumerate(rows):
        kinds.setdefault(_kind(row), []).append(index)
    for choose, indices in kinds.items():
        part = logits if len(indices) == len(rows) else logits[indices]
        chosen = choose(part, [rows[index] for index in indices])
        for index, token in zip(indices, chosen.tolist(), strict=True):
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
    values, ids = filters.keep_top_k(_apply_temperature(logits, rows), [row.sampling.top_k for row in rows])
    # In float64 what follows does not depend on how many columns a neighbour's top_k brought along.
    values = values.to(torch.float64)
    if any(row.sampling.top_p < 1 for row in rows):
        values = filters.keep_top_p(values, _top_p(values, rows), values.logsumexp(dim=-1, keepdim=True))
    return _draw(values, ids, rows)


def _draw_from_top_p(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    scaled = _apply_temperature(logits, rows).to(torch.float64)
    total, top_p = scaled.logsumexp(dim=-1, keepdim=True), _top_p(scaled, rows)
    values, ids = scaled.topk(min(_HEAD, scaled.shape[-1]), dim=-1)
    flat = ((values - total).exp().sum(dim=-1) < top_p[:, 0]).nonzero()[:, 0].tolist()
    tokens = _draw(filters.keep_top_p(values, top_p, total), ids, rows)
    if flat:
        values, ids = scaled[flat].sort(dim=-1, descending=True)
        remaining = filters.keep_top_p(values, top_p[flat], total[flat])
        tokens[flat] = _draw(remaining, ids, [rows[index] for index in flat])
    return tokens


def _apply_temperature(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """A dynamic temperature is applied later."""
    return logits / filters.column((1.0 if row.dynamic else row.sampling.temperature for row in rows), logits)


def _top_p(values: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    # Rounding may lift a sum of probabilities above 1, so a row that wants no top_p gets one out of reach.
    return filters.column((row.sampling.top_p if row.sampling.top_p < 1 else 2.0 for row in rows), values)


def _draw(values: torch.Tensor, ids: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """One of `ids` for each row, by probabilities softmax(values)."""
    if any(row.sampling.min_p > 0 for row in rows):
        values = filters.keep_min_p(values, filters.column((row.sampling.min_p for row in rows), values))
    if typical := [index for index, row in enumerate(rows) if row.sampling.typical_p < 1]:
        mass = filters.column((rows[index].sampling.typical_p for index in typical), values)
        values[typical] = filters.keep_typical(values[typical], mass)
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
    chosen = [index for index, row in enumerate(rows) if row.excludes]
    if not chosen:
        return values
    values = values.to(torch.float64)
    thresholds = filters.column((rows[index].sampling.xtc_threshold for index in chosen), values)
    values[chosen] = filters.exclude_top(values[chosen], thresholds)
    return values


def _rescale(values: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The values divided by their dynamic temperatures, of the rows that have one; a very low one leaves the best."""
    chosen = [index for index, row in enumerate(rows) if row.dynamic]
    if not chosen:
        return values
    values = values.to(torch.float64)
    part = values[chosen]
    temperatures = filters.dynamic_temperatures(
        part,
        filters.column((rows[index].temperatures[0] for index in chosen), part),
        filters.column((rows[index].temperatures[1] for index in chosen), part),
        filters.column((rows[index].sampling.dynatemp_exponent for index in chosen), part),
        filters.column((rows[index].sampling.temperature for index in chosen), part),
    )
    best = part.amax(dim=-1, keepdim=True)
    cold = temperatures < GREEDY_BELOW
    scaled = part / temperatures.masked_fill(cold, 1.0)
    values[chosen] = scaled.masked_fill(cold & (part < best), filters.REMOVED)
    return values


def _logprobs(logits: torch.Tensor, rows: Sequence[SamplingRow], tokens: list[int]) -> dict[int, TokenLogprobs]:
    """Log probabilities by row index, of those rows that want them."""
    counts = {index: row.sampling.logprobs for index, row in enumerate(rows) if row.sampling.logprobs is not None}
    if not counts:
        return {}
    indices = list(counts)
    logarithms = logits[indices].log_softmax(dim=-1)
    chosen = logarithms.gather(-1, torch.tensor([[tokens[index]] for index in indices], device=logits.device))
    best = logarithms.topk(min(max(counts.values()), logits.shape[-1]), dim=-1)
    rows_of = zip(counts.items(), chosen[:, 0].tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
    return {
        index: TokenLogprobs(own, list(zip(ids[:count], values[:count], strict=True)))
        for (index, count), own, ids, values in rows_of
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

    def sample(self, indices: list[int], rows: list[SamplingRow]) -> list[Sampled]:
        """A token for each of the rows `indices`. Raises NoTokenLeft."""
        logits = self._logits if len(indices) == len(self._logits) else self._logits[indices]
        return self._sampler.sample(logits, rows)
