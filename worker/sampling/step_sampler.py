"""The leader's part of sampling: from the rows' logits to token ids, one failure never touching another row."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog
import torch

from control.messages import TokenLogprobs
from control.text.text import Decode
from worker.engine.step import NO_TOKEN, Forward
from worker.sampling.bad_words import BadWordsIndex
from worker.sampling.health import inspect
from worker.sampling.masks import Masks
from worker.sampling.reasoning import forced_tokens
from worker.sampling.sampler import NOT_FINITE, NoTokenLeft, Sampler, SamplingRow
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()


@dataclass(slots=True)
class StepTokens:
    """A token for each row of a forward, NO_TOKEN where one could not be sampled, and what the ids alone don't tell."""

    ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Log probabilities of the rows that asked for them, by sid."""
    failures: dict[int, str] = field(default_factory=dict)
    """Reasons why rows have no token, by sid."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Constraints on the next tokens of a step's rows, by sid; empty in most steps."""

    allowed: dict[int, torch.Tensor]
    """Tokens that grammars allow, by sid."""
    forbidden: dict[int, list[int]]
    """Tokens that bad words forbid, by sid."""
    forced: dict[int, int]
    """Tokens that reasoning budgets force, by sid."""


class StepSampler:
    def __init__(self, on_device: bool | None = None, decode: Decode | None = None) -> None:
        """`decode` finds the marks of a reasoning that are no tokens of their own."""
        self._sampler, self._decode = Sampler(), decode
        self.on_device = on_device
        """True if tokens are computed without waiting in between; None: where logits are on a GPU."""
        self._masks = Masks()
        self._bad_words = BadWordsIndex()

    def begin(self, rows: list[Sequence], forward: Forward) -> PendingTokens:
        """Begin to sample a token for each of `rows`, which are those of the forward. Raises ValueError where they are
        not."""
        sids = [row.sid for row in rows]
        if forward.sids != sids:
            raise ValueError(f"the engine samples rows {forward.sids}, the plan {sids}")
        if self.on_device is None:
            self.on_device = forward.logits.is_cuda
        # Where the forward runs on a GPU still, filling the masks costs no time.
        allowed, forced = self._masks.fill(rows), forced_tokens(rows, self._decode)
        forced = {sid: token for sid, token in forced.items() if sid not in allowed or _allows(allowed[sid], token)}
        wanted = Wanted(allowed, self._bad_words.forbidden(rows), forced)
        pending = PendingTokens(self._sampler, rows, forward.logits, wanted)
        if self.on_device:
            pending.launch()
        return pending


def _allows(bits: torch.Tensor, token: int) -> bool:
    return bool(bits[token >> 3] >> (token & 7) & 1)


class PendingTokens:
    """The tokens of one forward's rows. On a GPU they are under way, and the host has not waited for them."""

    def __init__(self, sampler: Sampler, rows: list[Sequence], logits: torch.Tensor, wanted: Wanted) -> None:
        self._sampler, self._rows, self._logits, self._wanted = sampler, rows, logits, wanted
        self._outcome = StepTokens([NO_TOKEN] * len(rows))
        self._unfit = self._without_a_token()
        self._arriving: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self.on_device: torch.Tensor | None = None
        """The tokens where only the device has them: the next step can be launched with them before `wait`."""

    def launch(self) -> None:
        """Launch the sampling of all rows on the device; nothing where a row needs another way."""
        if not self._rows or self._unfit:
            return
        try:
            launched = self._sampler.launch(self._logits, [self._row(row) for row in self._rows])
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
                return self._outcome
        if self._rows:
            self._sample_here()
        return self._outcome

    def _sample_here(self) -> None:
        """Sample the rows with as many waits for the device as they need."""
        rows, outcome = self._rows, self._outcome
        sick = inspect(self._logits)
        for index, report in sick.items():
            self._fail(rows[index], f"the model produced logits that are not finite: {report}")
        healthy = [index for index in range(len(rows)) if index not in sick and index not in self._unfit]
        tokens = self._tokens(self._logits, [rows[index] for index in healthy], healthy)
        for index, token in zip(healthy, tokens, strict=True):
            outcome.ids[index] = token

    def _without_a_token(self) -> set[int]:
        """Indices of the rows whose grammar has failed: no token could follow."""
        failed: set[int] = set()
        for index, row in enumerate(self._rows):
            if row.constraint is not None and row.constraint.failure:
                failed.add(index)
                self._fail(row, f"the answer can't go on as its grammar wants it: {row.constraint.failure}")
        return failed

    def _tokens(self, logits: torch.Tensor, rows: list[Sequence], indices: list[int]) -> list[int]:
        if not rows:
            return []
        chosen = logits if len(indices) == len(logits) else logits[indices]
        try:
            return self._sample(chosen, rows)
        except Exception as error:
            if len(rows) == 1 and isinstance(error, NoTokenLeft):
                self._fail(rows[0], NoTokenLeft.message)
                return [NO_TOKEN]
            if len(rows) == 1:
                log.exception("could not sample a row", rid=rows[0].rid, action="sample")
                self._fail(rows[0], "its token could not be sampled; the server's log has the cause")
                return [NO_TOKEN]
        # A fault in one row's parameters must not reach its neighbours: sample each alone.
        return [token for i, row in enumerate(rows) for token in self._tokens(chosen[i : i + 1], [row], [0])]

    def _sample(self, logits: torch.Tensor, rows: list[Sequence]) -> list[int]:
        sampled = self._sampler.sample(logits, [self._row(row) for row in rows])
        for row, choice in zip(rows, sampled, strict=True):
            if choice.logprobs is not None:
                self._outcome.logprobs[row.sid] = choice.logprobs
        return [choice.token for choice in sampled]

    def _row(self, sequence: Sequence) -> SamplingRow:
        return SamplingRow(
            sampling=sequence.sampling,
            seed=int(sequence.sampling.seed),
            choice=sequence.choice,
            position=len(sequence.output),
            prompt=sequence.prompt,
            output=sequence.output,
            forbidden=self._wanted.forbidden.get(sequence.sid, ()),
            forced=self._wanted.forced.get(sequence.sid),
            allowed=self._wanted.allowed.get(sequence.sid),
        )

    def _fail(self, sequence: Sequence, why: str) -> None:
        log.error("a row failed", rid=sequence.rid, choice=sequence.choice, error=why, action="sample")
        self._outcome.failures[sequence.sid] = why
