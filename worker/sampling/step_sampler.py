"""The leader's part of sampling: from the rows' logits to token ids, one failure never touching another row."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import msgspec
import structlog
import torch

from control.messages import TokenLogprobs
from control.text.text import Decode
from worker.engine.step import NO_TOKEN, REJECTED, Forward
from worker.sampling.constraints import Constraints, TokenConstraints
from worker.sampling.sampler import NOT_FINITE, NoTokenLeft, Sampler, SamplingRow
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
        self._sampler = Sampler()
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
            self.on_device = forward.logits.is_cuda
        # Where the forward runs on a GPU still, filling the masks costs no time.
        constraints, failed = self._constraints.of(rows)
        pending = PendingTokens(self._sampler, rows, forward, constraints, failed)
        if self.on_device:
            pending.launch()
        return pending


class PendingTokens:
    """The tokens of one forward's rows. On a GPU they are under way, and the host has not waited for them."""

    def __init__(
        self,
        sampler: Sampler,
        rows: list[Sequence],
        forward: Forward,
        constraints: TokenConstraints,
        failed: Set[int] = frozenset(),
    ) -> None:
        """`failed`: indices of the rows whose constraints could not be computed; they get no token."""
        self._sampler = sampler
        self._rows = rows
        self._logits = forward.logits
        self._best_tokens = forward.best_tokens
        self._best: list[int] | None = None
        """The most probable token of each row, where it was looked for."""
        self._constraints = constraints
        self._outcome = StepTokens([NO_TOKEN] * len(rows))
        self._unfit = self._without_a_token()
        for index in failed - self._unfit:
            self._unfit.add(index)
            self._fail(index, NOT_SAMPLED)
        self._arriving: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.on_device: torch.Tensor | None = None
        """The tokens where only the device has them: the next step can be launched with them before `wait`."""

    def launch(self) -> None:
        """Launch the sampling of all rows on the device; nothing where a row needs another way."""
        if not self._rows or self._unfit:
            return
        try:
            launched = self._sampler.launch(self._logits, self._sampling_rows(range(len(self._rows))))
        except Exception:
            log.exception("could not sample a step at once", action="sample")
            return
        if launched is None:
            return
        # The copy goes before whatever is launched next, and only the copy is waited for.
        self._arriving = launched.to("cpu", non_blocking=True)
        if launched.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self.on_device = launched

    def wait(self) -> StepTokens:
        """The tokens, once the host has them. Rows that were not launched, or are sick, are sampled here."""
        if self._arriving is not None:
            if self._arrived is not None:
                self._arrived.synchronize()
            tokens: list[int] = self._arriving.tolist()
            if NOT_FINITE not in tokens:
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
        if self._best_tokens is None:
            sick = inspect(self._logits)
        else:
            self._best = self._best_tokens(self._logits)
            sick = {index: describe(self._logits[index]) for index, best in enumerate(self._best) if best == NOT_FINITE}
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
        logits = self._logits if len(indices) == len(self._logits) else self._logits[indices]
        best = None if self._best is None else [self._best[index] for index in indices]
        sampled = self._sampler.sample(logits, self._sampling_rows(indices), best)
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


class LogitsHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a row with NaN or infinity. The last three are over its finite values, None if there are none."""

    len: int
    nan: int
    pos_inf: int
    neg_inf: int
    finite_min: float | None
    max: float | None
    mean: float | None


def inspect(logits: torch.Tensor) -> dict[int, LogitsHealth]:
    """Reports of those rows of raw logits [rows, vocabulary] that are not finite throughout, by row index. A healthy
    batch costs one reduction, as a sum with NaN or infinity in it is not finite."""
    suspects = (~logits.sum(dim=-1).isfinite()).nonzero()[:, 0].tolist()
    # A sum of finite numbers may overflow, so the sum alone is no proof.
    return {row: describe(logits[row]) for row in suspects if not bool(logits[row].isfinite().all())}


def describe(row: torch.Tensor) -> LogitsHealth:
    finite = row[row.isfinite()].to(torch.float64)
    some = finite.numel() > 0
    return LogitsHealth(
        len=row.numel(),
        nan=int(row.isnan().sum()),
        pos_inf=int(row.isposinf().sum()),
        neg_inf=int(row.isneginf().sum()),
        finite_min=float(finite.min()) if some else None,
        max=float(finite.max()) if some else None,
        mean=float(finite.mean()) if some else None,
    )
