"""The leader's part of sampling: from the rows' logits to token ids, one failure never touching another row."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from control.messages import TokenLogprobs
from control.text.text import Decode
from worker.engine.step import NO_TOKEN, REJECTED, Forward
from worker.native.library import NOT_FINITE, Threads
from worker.sampling.constraints import Constraints, TokenConstraints
from worker.sampling.sampler import LogitsHealth, NoTokenLeft, Sampled, Sampler, SamplingRow, describe
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()

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
        from worker.sampling.tensor_sampler import TensorLogits  # only where torch runs the forward

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

    def sample(self, indices: list[int], rows: list[SamplingRow]) -> list[Sampled]:
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

    def sample(self, indices: list[int], rows: list[SamplingRow]) -> list[Sampled]:
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
        self._rows, self._logits, self._constraints = rows, logits, constraints
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
