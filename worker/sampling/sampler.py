"""From logits to tokens, on rank 0, as a pure function of (seed, choice, position, logits) of each row alone.

The order is transformers': logit_bias, repetition, presence and frequency penalties, bad words, min_tokens, the
grammar, then temperature, top_k, top_p, min_p, typical_p. The draw is an argmax of logits plus Gumbel noise, whose bits
are a number for each (seed, choice, position, token). Log probabilities are those of the raw logits, as OpenAI and vLLM
report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from control.messages import Sampling, TokenLogprobs
from worker.native import library
from worker.native.library import NO_TOKEN_LEFT, Threads
from worker.sampling.noise import row_key

_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: divided by it, float32 logits overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRow:
    """The parameters of sampling one row; `position` is the new token's index in the choice's output."""

    sampling: Sampling
    seed: int
    choice: int
    position: int
    prompt: list[int]
    output: list[int]
    guessed: tuple[int, ...] = ()
    """Tokens after `output` that the row supposes."""
    forbidden: Sequence[int] = ()
    """The tokens with which a bad word would be complete."""
    forced: int | None = None
    """The only token that may come, whatever the logits are."""
    allowed: NDArray[np.uint8] | None = None
    """The tokens that its grammar allows, [ceil(vocabulary / 8)], a bit for each, the lowest of a byte first; at least
    one is set."""

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < _GREEDY_BELOW

    @property
    def penalised(self) -> bool:
        return self.sampling.presence_penalty != 0 or self.sampling.frequency_penalty != 0

    @property
    def must_go_on(self) -> bool:
        """True if its stop ids are impossible still; `allowed` takes that into account already."""
        return self.allowed is None and self.position < self.sampling.min_tokens and bool(self.sampling.stop_ids)

    @property
    def plain(self) -> bool:
        """True if its token is the argmax of its raw logits."""
        repeats = self.sampling.repetition_penalty != 1
        changed = self.sampling.logit_bias or repeats or self.penalised or self.forbidden or self.must_go_on
        return self.greedy and self.allowed is None and not changed

    @property
    def ranks(self) -> bool:
        """True if log probabilities are wanted."""
        return self.sampling.logprobs is not None

    @property
    def immediate(self) -> bool:
        """True if its token is an argmax of raw logits that are allowed, or of scaled ones with noise: nothing is read
        on the way."""
        sampling = self.sampling
        untouched = sampling.logprobs is None and not (sampling.logit_bias or self.forbidden or self.must_go_on)
        untouched = untouched and sampling.repetition_penalty == 1 and not self.penalised
        whole = sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.typical_p >= 1
        return untouched and self.forced is None and (self.greedy or whole)


class NoTokenLeft(Exception):
    """A row whose every token is forbidden."""

    message = "'bad_words' forbids every token that could follow here; send fewer of them, or another grammar"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A row's token, and its log probabilities where the row asked for them."""

    token: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Samples all rows of a step in C++, each by one of the model's threads (sample.h). It keeps no state between
    steps, not even a random generator's."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def sample(
        self, logits: NDArray[np.float32], rows: Sequence[SamplingRow], best: list[int] | None = None
    ) -> list[Sampled]:
        """One token for each row of `logits` [rows, vocabulary] (finite; not changed). `best` are their argmaxima where
        the caller has them. Raises NoTokenLeft, and ValueError for a forced token that is none."""
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")
        if best is None:
            best = self._threads.best_tokens(logits)
        sampled = [Sampled(token) for token in best]
        others = [index for index, row in enumerate(rows) if not row.plain or row.forced is not None or row.ranks]
        if others:
            structs, kept = (library.Sampled * len(others))(), list[Any]()
            for index, struct in zip(others, structs, strict=True):
                struct.logits, struct.vocabulary = logits[index].ctypes.data, logits.shape[1]
                kept.append(_fill(struct, rows[index]))
            self._threads.sample(structs)
            for index, struct, (ranks, rankings, *_) in zip(others, structs, kept, strict=True):
                if struct.token == NO_TOKEN_LEFT:
                    raise NoTokenLeft
                sampled[index] = _result(struct, ranks, rankings)
        return sampled


def _fill(struct: library.Sampled, row: SamplingRow) -> list[NDArray[Any]]:
    """Set what C++ reads of a row. The arrays must live as long: the first two get its best tokens, and their log
    probabilities."""
    sampling = row.sampling
    ranked = -1 if sampling.logprobs is None else min(sampling.logprobs, struct.vocabulary)
    kept: list[NDArray[Any]] = [np.empty(max(ranked, 0), np.int64), np.empty(max(ranked, 0), np.float32)]

    def place(values: Iterable[float], dtype: type = np.int64) -> tuple[int, int]:
        kept.append(np.array(list(values), dtype))
        return kept[-1].ctypes.data, len(kept[-1])

    struct.ranked, struct.ranks, struct.rankings = ranked, kept[0].ctypes.data, kept[1].ctypes.data
    if row.forced is not None and not 0 <= row.forced < struct.vocabulary:
        raise ValueError(f"the forced token {row.forced} is not among the {struct.vocabulary} of the vocabulary")
    struct.forced = -1 if row.forced is None else row.forced
    struct.temperature = 0.0 if row.greedy else sampling.temperature
    struct.top_k, struct.top_p = sampling.top_k, sampling.top_p
    struct.min_p, struct.typical_p = sampling.min_p, sampling.typical_p
    struct.repetition = sampling.repetition_penalty
    struct.presence, struct.frequency = sampling.presence_penalty, sampling.frequency_penalty
    struct.key = row_key(row.seed, row.choice, row.position)
    if sampling.logit_bias:
        struct.biased, struct.bias_count = place(sampling.logit_bias)
        struct.biases, _ = place(sampling.logit_bias.values(), np.float32)
    if sampling.repetition_penalty != 1:
        struct.context, struct.context_count = place([*row.prompt, *row.output, *row.guessed])
    if row.penalised:
        struct.output, struct.output_count = place([*row.output, *row.guessed])
    if row.forbidden or row.must_go_on:
        stops = sampling.stop_ids if row.must_go_on else ()
        struct.forbidden, struct.forbidden_count = place([*row.forbidden, *stops])
    if row.allowed is not None:
        kept.append(row.allowed)
        struct.allowed, struct.allowed_bytes = row.allowed.ctypes.data, len(row.allowed)
    return kept


def _result(struct: library.Sampled, ranks: NDArray[np.int64], rankings: NDArray[np.float32]) -> Sampled:
    if struct.ranked < 0:
        return Sampled(struct.token)
    best = list(zip(ranks.tolist(), rankings.tolist(), strict=True))
    return Sampled(struct.token, TokenLogprobs(struct.logprob, best))


class LogitsHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a row with NaN or infinity. The last three are over its finite values, None if there are none."""

    len: int
    nan: int
    pos_inf: int
    neg_inf: int
    finite_min: float | None
    max: float | None
    mean: float | None


def describe(row: NDArray[Any]) -> LogitsHealth:
    """The statistics of one row of logits."""
    finite = row[np.isfinite(row)].astype(np.float64)
    return LogitsHealth(
        len=row.size,
        nan=int(np.isnan(row).sum()),
        pos_inf=int(np.isposinf(row).sum()),
        neg_inf=int(np.isneginf(row).sum()),
        finite_min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        mean=float(finite.mean()) if finite.size else None,
    )
