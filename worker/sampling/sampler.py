"""From logits to tokens, on rank 0, as a pure function of (seed, choice, position, logits) of each row alone.

The order is transformers': logit_bias, repetition, presence and frequency penalties, DRY's, bad words, min_tokens, the
grammar, then top-nσ, temperature, top_k, top_p, min_p, typical_p, XTC. A dynamic temperature follows from the tokens
that these leave, and comes after them in place of the fixed one, as at llama.cpp. The draw is an argmax of logits plus
Gumbel noise, whose bits are a number for each (seed, choice, position, token). Log probabilities are those of the raw
logits, as OpenAI and vLLM report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from control.messages import Sampling, TokenLogprobs
from control.text.text_stream import Decode
from worker.engine.step import NO_TOKEN, REJECTED, Forward
from worker.native import library
from worker.native.library import NO_TOKEN_LEFT, NOT_FINITE, Threads
from worker.sampling.constraints import Constraints, TokenConstraints
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()


# Randomness without state: a number for each (seed, choice, position, token), the same in every batch and epoch.
#
# The generator is splitmix64: a counter with an odd constant, and a finaliser. (Steele, Lea, Flood: Fast Splittable
# Pseudorandom Number Generators, 2014.) Its numbers for tokens are made where the logits are: in C++ (sample.h), or by
# torch (torch/sampler.py).


MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


def uniform(key: int) -> float:
    """A number from 0 to 1 of a row's own; none of its tokens has it."""
    return (_mix(key) >> 11) * 2.0**-53


def row_key(seed: int, choice: int, position: int) -> int:
    """A 64-bit key of one token's place: `choice` of the request with `seed`, at `position`."""
    key = seed & MASK
    for part in (choice, position):
        key = _mix((key + STEP) & MASK) ^ part
    return _mix((key + STEP) & MASK)


GREEDY_BELOW = 1e-5
"""A lower temperature is greedy: divided by it, float32 logits overflow."""
_XTC_OFF = 0.5
"""Of no two tokens each has more than that."""


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
    forbidden: Tokens[int] = ()
    """The tokens with which a bad word would be complete."""
    reductions: Mapping[int, float] = field(default_factory=dict[int, float])
    """The numbers subtracted from logits of tokens that would repeat a sequence of the context, by token."""
    forced: int | None = None
    """The only token that may come, whatever the logits are."""
    allowed: NDArray[np.uint8] | None = None
    """The tokens that its grammar and `allowed_token_ids` allow, [ceil(vocabulary / 8)] or fewer bytes, a bit for each
    token, the lowest of a byte first; at least one is set."""

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

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
        changed = changed or self.reductions
        return self.greedy and self.allowed is None and not changed

    @property
    def dynamic(self) -> bool:
        """True if its temperature follows from the entropy of the tokens that are left."""
        return self.sampling.dynatemp_range > 0

    @property
    def excludes(self) -> bool:
        """True if XTC is on and its chance has come at this position."""
        sampling = self.sampling
        if sampling.xtc_probability <= 0 or not 0 < sampling.xtc_threshold <= _XTC_OFF:
            return False
        return uniform(row_key(self.seed, self.choice, self.position)) < sampling.xtc_probability

    @property
    def temperatures(self) -> tuple[float, float]:
        """The least and the greatest dynamic temperature."""
        sampling = self.sampling
        return max(0.0, sampling.temperature - sampling.dynatemp_range), sampling.temperature + sampling.dynatemp_range

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
        untouched = untouched and sampling.repetition_penalty == 1 and not self.penalised and not self.reductions
        whole = sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.typical_p >= 1
        whole = whole and sampling.top_n_sigma <= 0 and not self.dynamic and not self.excludes
        return untouched and self.forced is None and (self.greedy or whole)


class NoTokenLeft(Exception):
    """A row whose every token is forbidden."""

    message = "'bad_words' forbids every token that could follow here; send fewer of them, or another grammar"


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's token, and its log probabilities if they were requested."""

    token: int
    logprobs: TokenLogprobs | None = None


class Sampler:
    """Samples all rows of a step in C++, each by one of the model's threads (sample.h). It keeps no state between
    steps, not even a random generator's."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def sample(
        self, logits: NDArray[np.float32], rows: list[SamplingRow], best: list[int] | None = None
    ) -> list[SampledToken]:
        """One token for each row of `logits` [rows, vocabulary] (finite; not changed). `best` are their argmaxima where
        the caller has them. Raises NoTokenLeft, and ValueError for a forced token that is none."""
        if logits.ndim != 2 or logits.shape[0] != len(rows):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(rows)} rows")
        if best is None:
            best = self._threads.best_tokens(logits)
        sampled = [SampledToken(token) for token in best]
        other_rows = [index for index, row in enumerate(rows) if not row.plain or row.forced is not None or row.ranks]
        if other_rows:
            structs = (library.Sampled * len(other_rows))()
            arrays = list[Any]()
            for index, struct in zip(other_rows, structs, strict=True):
                struct.logits, struct.vocabulary = logits[index].ctypes.data, logits.shape[1]
                arrays.append(_fill(struct, rows[index]))
            self._threads.sample(structs)
            for index, struct, (ranks, rankings, *_) in zip(other_rows, structs, arrays, strict=True):
                if struct.token == NO_TOKEN_LEFT:
                    raise NoTokenLeft
                sampled[index] = _result(struct, ranks, rankings)
        return sampled


def _fill(struct: library.Sampled, row: SamplingRow) -> list[NDArray[Any]]:
    """Set what C++ reads of a row. The arrays must live as long: the first two get its best tokens, and their log
    probabilities."""
    sampling = row.sampling
    ranked = -1 if sampling.logprobs is None else min(sampling.logprobs, struct.vocabulary)
    arrays: list[NDArray[Any]] = [np.empty(max(ranked, 0), np.int64), np.empty(max(ranked, 0), np.float32)]

    def place(values: Iterable[float], dtype: type = np.int64) -> tuple[int, int]:
        arrays.append(np.array(list(values), dtype))
        return arrays[-1].ctypes.data, len(arrays[-1])

    struct.ranked, struct.ranks, struct.rankings = ranked, arrays[0].ctypes.data, arrays[1].ctypes.data
    if row.forced is not None and not 0 <= row.forced < struct.vocabulary:
        raise ValueError(f"the forced token {row.forced} is not among the {struct.vocabulary} of the vocabulary")
    struct.forced = -1 if row.forced is None else row.forced
    struct.temperature = 0.0 if row.greedy else sampling.temperature
    struct.top_k, struct.top_p = sampling.top_k, sampling.top_p
    struct.min_p, struct.typical_p = sampling.min_p, sampling.typical_p
    struct.repetition = sampling.repetition_penalty
    struct.presence, struct.frequency = sampling.presence_penalty, sampling.frequency_penalty
    struct.top_n_sigma = sampling.top_n_sigma
    struct.xtc_threshold = sampling.xtc_threshold if row.excludes else 0.0
    struct.dynamic = row.dynamic
    struct.coldest, struct.hottest = row.temperatures
    struct.exponent = sampling.dynatemp_exponent
    struct.key = row_key(row.seed, row.choice, row.position)
    if row.reductions:
        struct.reduced, struct.reduced_count = place(row.reductions)
        struct.reductions, _ = place(row.reductions.values(), np.float32)
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
        arrays.append(row.allowed)
        struct.allowed, struct.allowed_bytes = row.allowed.ctypes.data, len(row.allowed)
    return arrays


def _result(struct: library.Sampled, ranks: NDArray[np.int64], rankings: NDArray[np.float32]) -> SampledToken:
    if struct.ranked < 0:
        return SampledToken(struct.token)
    best = list(zip(ranks.tolist(), rankings.tolist(), strict=True))
    return SampledToken(struct.token, TokenLogprobs(struct.logprob, best))


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


NONE_ALLOWED = "'allowed_token_ids' has no token that could follow here; name more, or use another grammar"
NOT_SAMPLED = "its token could not be sampled; the server's log has the cause"


@dataclass(slots=True)
class StepTokens:
    """A token for each row of a forward, and what the ids alone don't tell."""

    ids: list[int]
    """NO_TOKEN where one could not be sampled, REJECTED in the rows after a wrong guess."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Log probabilities of the rows that asked for them, by index."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reasons why rows have no token, by index."""
    vectors: dict[int, bytes] = field(default_factory=dict)
    """Results of rows that are inputs, by index."""


class StepSampler:
    def __init__(self, on_device: bool | None = None, decode: Decode | None = None) -> None:
        """`decode` finds the marks of a reasoning that are no tokens of their own."""
        self._constraints = Constraints(decode)
        self.on_device = on_device
        """True if tokens are computed without waiting in between; None: where logits are on a GPU."""

    def begin(self, rows: list[Sequence], forward: Forward) -> PendingTokens:
        """Begin to sample a token for each of `rows`, which are those of the forward: a sequence with guesses as it is
        before them and after each. Raises ValueError where they are not."""
        sids = [row.sid for row in rows]
        if forward.sids != sids:
            raise ValueError(f"the engine samples rows {forward.sids}, the plan {sids}")
        if self.on_device is None:
            self.on_device = forward.threads is None and forward.logits.is_cuda
        # Where the forward runs on a GPU still, filling the masks costs no time.
        constraints, failed = self._constraints.of(rows)
        pending = PendingTokens(rows, self._logits_of(forward), constraints, failed)
        if self.on_device:
            pending.launch()
        return pending

    @staticmethod
    def _logits_of(forward: Forward) -> StepLogits:
        if forward.threads is not None:
            return HostLogits(forward.logits, forward.threads)
        from worker.sampling.torch.sampler import TensorLogits  # only where torch runs the forward

        return TensorLogits(forward.logits)


class StepLogits(Protocol):
    """The logits of a forward's rows, and the way to sample them."""

    on_device: Any
    """The tokens where only the device has them: the next step can be launched with them before they have arrived."""

    def launch(self, rows: list[SamplingRow]) -> None:
        """Launch the sampling of all rows on the device; nothing where a row needs another way."""
        ...

    def arrived(self) -> list[int] | None:
        """The tokens that were launched, once the host has them; None if none were."""
        ...

    def inspect(self) -> dict[int, LogitsHealth]:
        """Reports of those rows that are not finite throughout, by row index."""
        ...

    def sample(self, indices: list[int], rows: list[SamplingRow]) -> list[SampledToken]:
        """A token for each of the rows `indices`. Raises NoTokenLeft."""
        ...


class HostLogits:
    """Float32 logits [rows, vocabulary] in the host's memory, which the model's threads sample."""

    on_device = None

    def __init__(self, logits: NDArray[np.float32], threads: Threads) -> None:
        self._logits = logits
        self._sampler, self._threads = Sampler(threads), threads
        self._best: list[int] = []

    def launch(self, rows: list[SamplingRow]) -> None:
        """Do nothing: they are sampled at once."""

    def arrived(self) -> None:
        return None

    def inspect(self) -> dict[int, LogitsHealth]:
        """One read finds the most probable tokens too."""
        self._best = self._threads.best_tokens(self._logits)
        return {index: describe(self._logits[index]) for index, best in enumerate(self._best) if best == NOT_FINITE}

    def sample(self, indices: list[int], rows: list[SamplingRow]) -> list[SampledToken]:
        whole = len(indices) == len(self._logits)
        return self._sampler.sample(
            self._logits if whole else self._logits[indices], rows, [self._best[index] for index in indices]
        )


class PendingTokens:
    """The tokens of one forward's rows. On a GPU they are under way, and the host has not waited for them."""

    def __init__(
        self, rows: list[Sequence], logits: StepLogits, constraints: TokenConstraints, failed: Set[int] = frozenset()
    ) -> None:
        """`failed`: indices of the rows whose constraints could not be computed; they get no token."""
        self._rows = rows
        self._logits = logits
        self._constraints = constraints
        self._outcome = StepTokens([NO_TOKEN] * len(rows))
        self._unfit = self._without_a_token()
        for index in failed - self._unfit:
            self._unfit.add(index)
            self._fail(index, NOT_SAMPLED)

    @property
    def on_device(self) -> Any:
        """The tokens where only the device has them: the next step can be launched with them before `wait`."""
        return self._logits.on_device

    def launch(self) -> None:
        """Launch the sampling of all rows on the device; nothing where a row needs another way."""
        if not self._rows or self._unfit:
            return
        try:
            self._logits.launch(self._sampling_rows(range(len(self._rows))))
        except Exception:
            log.exception("could not sample a step at once", action="sample")

    def wait(self) -> StepTokens:
        """The tokens, once the host has them. Rows that were not launched, or are sick, are sampled here."""
        tokens = self._logits.arrived()
        if tokens is not None and NOT_FINITE not in tokens:
            self._outcome.ids = tokens
            self._reject()
            return self._outcome
        if self._rows:
            self._sample_here()
            self._reject()
        return self._outcome

    def _reject(self) -> None:
        """Drop the tokens that were sampled after a wrong guess. A row after a guess that could not be sampled is
        dropped too: the next step has it without a guess, and says why."""
        ids = self._outcome.ids
        for index, row in enumerate(self._rows):
            if row.guessed and (ids[index - 1] != row.guessed[-1] or ids[index] == NO_TOKEN):
                ids[index] = REJECTED

    def _sample_here(self) -> None:
        """Sample the rows with as many waits for the device as they need."""
        sick = self._logits.inspect()
        for index, report in sick.items():
            self._fail(index, f"the model produced logits that are not finite: {report}")
        healthy = [index for index in range(len(self._rows)) if index not in sick and index not in self._unfit]
        for index, token in zip(healthy, self._tokens(healthy), strict=True):
            self._outcome.ids[index] = token

    def _without_a_token(self) -> set[int]:
        """Indices of the rows whose grammar has failed: no token could follow."""
        failed: set[int] = set()
        for index, row in enumerate(self._rows):
            if row.constraint is not None and row.constraint.failure:
                failed.add(index)
                self._fail(index, f"the answer can't go on as its grammar wants it: {row.constraint.failure}")
        for index in self._constraints.impossible - failed:
            failed.add(index)
            self._fail(index, NONE_ALLOWED)
        return failed

    def _tokens(self, indices: list[int]) -> list[int]:
        """The tokens of these rows."""
        if not indices:
            return []
        try:
            return self._sample(indices)
        except Exception as error:
            if len(indices) == 1 and isinstance(error, NoTokenLeft):
                self._fail(indices[0], NoTokenLeft.message)
                return [NO_TOKEN]
            if len(indices) == 1:
                log.exception("could not sample a row", rid=self._rows[indices[0]].rid, action="sample")
                self._fail(indices[0], NOT_SAMPLED)
                return [NO_TOKEN]
        # A fault in one row's parameters must not reach its neighbours: sample each alone.
        return [token for index in indices for token in self._tokens([index])]

    def _sample(self, indices: list[int]) -> list[int]:
        sampled = self._logits.sample(indices, self._sampling_rows(indices))
        for index, choice in zip(indices, sampled, strict=True):
            if choice.logprobs is not None:
                self._outcome.logprobs[index] = choice.logprobs
        return [choice.token for choice in sampled]

    def _sampling_rows(self, indices: Iterable[int]) -> list[SamplingRow]:
        rows = self._rows
        constraints = self._constraints
        return [
            SamplingRow(
                sampling=rows[index].sampling,
                seed=int(rows[index].sampling.seed),
                choice=rows[index].choice,
                position=rows[index].position,
                prompt=rows[index].prompt,
                output=rows[index].output,
                guessed=rows[index].guessed,
                forbidden=constraints.forbidden.get(index, ()),
                reductions=constraints.reductions.get(index, {}),
                forced=constraints.forced.get(index),
                allowed=constraints.allowed.get(index),
            )
            for index in indices
        ]

    def _fail(self, index: int, why: str) -> None:
        self._outcome.failures[index] = why
        row = self._rows[index]
        if not row.guessed:
            log.error("a row failed", rid=row.rid, choice=row.choice, error=why, action="sample")
