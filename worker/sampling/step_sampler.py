"""The leader's part of sampling: from the rows' logits to token ids, one failure never touching another row."""

from __future__ import annotations

import structlog
import torch

from control.messages import TokenLogprobs
from worker.engine.ahead import Meanwhile
from worker.sampling.health import inspect
from worker.sampling.masks import Masks
from worker.sampling.sampler import SICK, Sampler, SamplingRow
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()

FAILED = -1
"""Broadcast in place of a token where a row could not be sampled; the leader drops such a sequence."""


class StepSampler:
    """Samples a step's rows on rank 0 and remembers what the ids alone don't tell."""

    def __init__(self, on_device: bool | None = None) -> None:
        self._sampler = Sampler()
        self.on_device = on_device
        """Whether tokens are computed without waiting in between; None: where logits are on a GPU."""
        self.logprobs: dict[int, TokenLogprobs] = {}
        """By sid, of the last step's rows that asked for them."""
        self.failures: dict[int, str] = {}
        """By sid, why a row was answered FAILED."""
        self._masks = Masks()
        self._allowed: dict[int, torch.Tensor] = {}
        """By sid, what the grammars of this step's constrained rows allow."""

    def sample(
        self, rows: list[Sequence], logits: torch.Tensor, sids: list[int], meanwhile: Meanwhile | None = None
    ) -> list[int]:
        """A token for each of `rows`, FAILED where there is none, from logits [len(rows), vocabulary]; `sids` are what
        the engine takes the rows for. `meanwhile` is called where the tokens are on the device before they are here."""
        if sids != [row.sid for row in rows]:
            raise ValueError(f"the engine samples rows {sids}, the plan {[row.sid for row in rows]}")
        self.logprobs.clear()
        if self.on_device is None:
            self.on_device = logits.is_cuda
        self._allowed = self._masks.fill(rows)  # where the forward runs on a GPU still, this costs no time
        unfit = self._without_a_token(rows)
        if self.on_device and not unfit and (at_once := self._at_once(logits, rows, meanwhile)) is not None:
            return at_once
        sick = inspect(logits)
        for index, report in sick.items():
            self._fail(rows[index], f"the model produced logits that are not finite: {report}")
        healthy = [index for index in range(len(rows)) if index not in sick and index not in unfit]
        tokens = [FAILED] * len(rows)
        for index, token in zip(healthy, self._tokens(logits, [rows[i] for i in healthy], healthy), strict=True):
            tokens[index] = token
        return tokens

    def _without_a_token(self, rows: list[Sequence]) -> set[int]:
        """Indices of the rows whose grammar has failed: no token could follow."""
        failed: set[int] = set()
        for index, row in enumerate(rows):
            if row.constraint is not None and row.constraint.failure:
                failed.add(index)
                self._fail(row, f"the answer can't go on as its grammar wants it: {row.constraint.failure}")
        return failed

    def _at_once(self, logits: torch.Tensor, rows: list[Sequence], meanwhile: Meanwhile | None) -> list[int] | None:
        """Every row's token with one wait for the device; None where a row is sick, fails, or needs more than that."""
        try:
            launched = self._sampler.launch(logits, [self._row(row) for row in rows])
        except Exception:
            log.exception("could not sample a step at once")
            return None
        if launched is None:
            return None
        # The copy goes before what `meanwhile` launches, and only the copy is waited for.
        copied = launched.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event() if launched.is_cuda else None
        if arrived is not None:
            arrived.record()
        if meanwhile is not None:
            meanwhile(launched)
        if arrived is not None:
            arrived.synchronize()
        tokens: list[int] = copied.tolist()
        return None if SICK in tokens else tokens

    def _tokens(self, logits: torch.Tensor, rows: list[Sequence], indices: list[int]) -> list[int]:
        if not rows:
            return []
        chosen = logits if len(indices) == len(logits) else logits[indices]
        try:
            return self._sample(chosen, rows)
        except Exception:
            if len(rows) == 1:
                log.exception("could not sample a row", rid=rows[0].rid)
                self._fail(rows[0], "its token could not be sampled; the server's log has the cause")
                return [FAILED]
        # A fault in one row's parameters must not reach its neighbours: sample each alone.
        return [token for i, row in enumerate(rows) for token in self._tokens(chosen[i : i + 1], [row], [0])]

    def _sample(self, logits: torch.Tensor, rows: list[Sequence]) -> list[int]:
        sampled = self._sampler.sample(logits, [self._row(row) for row in rows])
        for row, choice in zip(rows, sampled, strict=True):
            if choice.logprobs is not None:
                self.logprobs[row.sid] = choice.logprobs
        return [choice.token for choice in sampled]

    def _row(self, sequence: Sequence) -> SamplingRow:
        return SamplingRow(
            sampling=sequence.sampling,
            seed=int(sequence.sampling.seed),
            choice=sequence.choice,
            position=len(sequence.output),
            prompt=sequence.prompt,
            output=sequence.output,
            allowed=self._allowed.get(sequence.sid),
        )

    def _fail(self, sequence: Sequence, why: str) -> None:
        log.error("a row failed", rid=sequence.rid, choice=sequence.choice, error=why)
        self.failures[sequence.sid] = why
