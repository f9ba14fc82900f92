"""The engine: applies a GenerateStep to the running batch, runs the forward and spreads the sampled tokens.

Every rank of a group runs the same engine over the same commands; only rank 0 is given a sampler. A command is checked
in full before anything is changed, by rules that depend only on what is equal on all ranks, so they refuse alike.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from control.errors import RankError, RankErrorKind
from control.messages import GenerateStep
from worker.collective import Collective
from worker.engine.ahead import RunAhead, merged
from worker.engine.checks import CommandCheck
from worker.engine.graphs import graphs_for
from worker.kv.base import KVStore
from worker.models.batch import Row, flatten
from worker.models.served import ServedModel

Sample = Callable[..., list[int]]
"""(logits (rows, vocabulary), sids of the rows) → one token per row. A rank that runs ahead gives a third argument, a
`Meanwhile`, which may be called."""

Score = Callable[[Tensor, list[tuple[int, int]]], None]
"""(logits (count, vocabulary), the sid and the position of each). It must not raise: peers wait in what follows."""

GoesOn = Callable[[list[int]], bool]
"""(the tokens that were just sampled) → whether their sequences decode once more in the same command."""

NO_TOKEN = -1
"""What rank 0 broadcasts for every row when it could not sample."""


@dataclass(frozen=True)
class StepResult:
    """`tokens[i]` was sampled last for `sids[i]`; NO_TOKEN everywhere on the other ranks where rank 0 could not sample.

    `forwards` counts the forwards of the command and `fed` their tokens. `checksum` is equal on ranks that ran the same
    batches and got the same tokens.
    """

    sids: list[int]
    tokens: list[int]
    checksum: int
    fed: int
    forwards: int = 1


class Engine:
    """One model's running batch on this rank."""

    def __init__(self, model: ServedModel, store: KVStore, collective: Collective) -> None:
        self.model, self.store, self.collective = model, store, collective
        self._check = CommandCheck(store, model.vocab_size, collective.rank)
        self.graphs = graphs_for(model, store)
        self.ahead = None if self.graphs is None or collective.world_size > 1 else RunAhead(self.graphs)
        self._pending: dict[int, int] = {}
        """Sequence → the token sampled last, which it feeds in its next row."""

    def run(
        self,
        command: GenerateStep,
        sample: Sample | None,
        goes_on: GoesOn | None = None,
        score: Score | None = None,
    ) -> StepResult:
        """One step. Rows are the continuing sequences by ascending sid, then the command's rows in their order.

        With `repeat` rank 0 asks `goes_on` after each forward, and all ranks do as it says. What the command wants
        scored it gives to `score`, before it samples; again where a forward failed and the command is run once more.

        Raises RankError: `bad_request` or `forward_failed` with nothing changed where the command doesn't fit the
        batch; `forward_failed` where forward or broadcast failed, with the first cause as its `__cause__`. After a
        failed forward no length has grown, and the same command may be run again. What `sample` raises comes through
        after the broadcast: the rows are cached, and those that should have been sampled wait for a row of their own.
        """
        rows = self._rows(command)
        self._settle(rows)
        self._make_room(command)
        checksum, fed, forwards, more = command.seq, 0, 0, bool(rows)
        sids: list[int] = []
        tokens: list[int] = []
        while more:
            logits = self._forward(rows, score)
            sids, tokens, more = self._sample(rows, logits, sample, goes_on, command.repeat)
            checksum = _checksum(checksum, rows, tokens)
            fed, forwards = fed + sum(len(row.tokens) for row in rows), forwards + 1
            if more:
                rows = self._continuing(frozenset())
                self._check.room(rows)
                self._settle(rows)
        return StepResult(sids, tokens, checksum, fed, forwards)

    def _sample(
        self, rows: list[Row], logits: Tensor, sample: Sample | None, goes_on: GoesOn | None, repeat: bool
    ) -> tuple[list[int], list[int], bool]:
        """After a forward: the sids that were sampled, their tokens, and whether they all decode once more."""
        sids = [row.sid for row in rows if row.sample]
        for row in rows:
            self._pending.pop(row.sid, None)
        if not sids:
            return [], [], False
        if self.ahead is not None and sample is not None:
            sample = self._running_ahead(rows, sample)
        tokens, more = self._agree(logits, sids, sample, goes_on, repeat)
        self._pending.update((sid, token) for sid, token in zip(sids, tokens, strict=True) if token != NO_TOKEN)
        return sids, tokens, more

    def prepare(self) -> None:
        """Make ready for an epoch's steps; every rank of the group does this at the same time."""
        if self.graphs is not None:
            self.graphs.prepare()

    def leave(self) -> None:
        """Forget every sequence and let go of the group, before it is destroyed."""
        self.clear()
        if self.graphs is not None:
            self.graphs.release()

    def clear(self) -> None:
        """Forget every sequence."""
        if self.ahead is not None:
            self.ahead.forget()
        self._pending.clear()
        self.store.clear()

    def join(self, collective: Collective) -> None:
        """Go on in a new epoch's group: weights stay, sequences are forgotten (their ranks may differ by a step)."""
        self.leave()
        self.model.join(collective)
        self.collective = collective

    def _make_room(self, command: GenerateStep) -> None:
        """Forget who left and let newcomers begin with what others have; donors that left come last."""
        for sid in (*command.left, *command.kept):
            self._pending.pop(sid, None)
        donors = {prefix.donor: prefix for prefix in command.prefixes}  # the last one of each donor
        left = set(command.left)
        for sid in left - donors.keys():
            self.store.drop(sid)
        for prefix in command.prefixes:
            if self.store.length(prefix.sid) is None:  # else a run of this command that failed has done it
                take_over = prefix.donor in left and donors[prefix.donor] == prefix
                self.store.fork(prefix.sid, prefix.donor, prefix.count, take_over=take_over)

    # --- the batch ---------------------------------------------------------------------------------------------------

    def _rows(self, command: GenerateStep) -> list[Row]:
        self._check.shape(command)
        begun = self._check.prefixes(command)
        left, explicit, scored = set(command.left), set(command.sequences), self._check.scored(command)
        rows = self._continuing(left.union(command.paused, command.kept, explicit))
        for sid, tokens, offset, sampled in zip(
            command.sequences, command.tokens, command.offset, command.sample, strict=True
        ):
            cached = begun.get(sid, None if sid in left else self.store.length(sid))
            self._check.row(sid, tokens, offset, cached)
            rows.append(Row(sid, tokens, offset, sampled, scored.get(sid, range(0))))
        self._check.room(rows, left)
        return rows

    def _continuing(self, others: Set[int]) -> list[Row]:
        """The rows of the sequences that decode by themselves, all but `others`."""
        return [
            Row(sid, [self._pending[sid]], self.store.length(sid) or 0, True)
            for sid in sorted(self._pending.keys() - others)
        ]

    # --- the forward -------------------------------------------------------------------------------------------------

    def _forward(self, rows: list[Row], score: Score | None) -> Tensor:
        covered = [] if self.ahead is None else self.ahead.covered(rows)
        rest = rows if not covered else [row for row in rows if row not in covered]
        early = self.ahead.take(covered) if covered and self.ahead is not None else None
        try:
            logits = self._launch(rest, covered, score) if rest else None
        except Exception as error:
            shape = ", ".join(f"{row.sid}: {len(row.tokens)} at {row.offset}" for row in rows)
            raise self._error("forward_failed", f"{type(error).__name__}: {error} (rows {shape})") from error
        self.store.commit([row.extent for row in rows])
        if early is None or logits is None:
            return early if logits is None else logits  # type: ignore[return-value]  # there is at least one row
        return merged(rows, covered, early, logits)

    def _settle(self, rows: list[Row]) -> None:
        """What was launched early and is not among `rows` gives its room back, before others take it."""
        if self.ahead is not None:
            self.ahead.settle(rows)

    def _launch(self, rows: list[Row], beside: list[Row], score: Score | None) -> Tensor:
        if not beside and self.graphs is not None and self.graphs.takes(rows):
            # A copy: the graph may run again before the sampler has done with these.
            return self.graphs.run(rows).clone()
        cache = self.store.begin([row.extent for row in rows], [row.extent for row in beside])
        places = [(row.sid, position) for row in rows for position in row.scored]

        def hear(logits: Tensor, first: int) -> None:
            if score is not None:
                score(logits, places[first : first + len(logits)])

        return self.model.forward(flatten(rows, cache, self.model.device), hear)

    def _running_ahead(self, rows: list[Row], sample: Sample) -> Sample:
        """`sample`, which launches the step after `rows` as soon as the device has its tokens."""
        ahead = self.ahead
        assert ahead is not None
        following = [] if self._pending else ahead.following(rows)
        possible = bool(following) and self._check.needed(following) <= self.store.capacity_tokens

        def meanwhile(tokens: Tensor) -> None:
            if possible:
                ahead.launch(rows, following, tokens)

        def sampled(logits: Tensor, sids: list[int]) -> list[int]:
            ahead.forget()
            tokens = sample(logits, sids, meanwhile)
            ahead.known(sids, tokens)
            return tokens

        return sampled

    def _agree(
        self, logits: Tensor, sids: list[int], sample: Sample | None, goes_on: GoesOn | None, repeat: bool
    ) -> tuple[list[int], bool]:
        """Rank 0's tokens on every rank, and whether it goes on. The broadcast happens whatever the sampler did: peers
        are waiting in it."""
        chosen, more, failure = [NO_TOKEN] * len(sids), False, None
        if self.collective.rank == 0:
            try:
                chosen = self._sampled(logits, sids, sample)
                more = repeat and goes_on is not None and goes_on(chosen)
            except Exception as error:
                chosen, failure = [NO_TOKEN] * len(sids), error
        # A rank alone has nobody to tell, and a GPU is not asked to hand back what the host has just put there.
        device = self.model.device if self.collective.world_size > 1 else torch.device("cpu")
        agreed = torch.tensor([*chosen, int(more)] if repeat else chosen, dtype=torch.int64, device=device)
        try:
            tokens: list[int] = self.collective.broadcast(agreed).tolist()
        except Exception as error:
            raise self._error(
                "forward_failed", f"the tokens could not be broadcast: {type(error).__name__}: {error}"
            ) from (failure or error)
        if failure is not None:
            raise failure
        return (tokens[:-1], bool(tokens[-1])) if repeat else (tokens, False)

    def _sampled(self, logits: Tensor, sids: list[int], sample: Sample | None) -> list[int]:
        if sample is None:
            raise self._error("bad_request", "rank 0 was given no sampler")
        chosen = sample(logits, sids)
        if len(chosen) != len(sids):
            raise self._error("forward_failed", f"the sampler gave {len(chosen)} tokens for {len(sids)} rows")
        return chosen

    def _error(self, kind: RankErrorKind, message: str) -> RankError:
        return RankError(self.collective.rank, kind, message)


def _checksum(before: int, rows: list[Row], tokens: list[int]) -> int:
    """crc32 over what was before (the seq, then the forward before this one), each row's (sid, offset, count) and the
    tokens, as little-endian 64-bit numbers."""
    numbers = [before, *(part for row in rows for part in (row.sid, row.offset, len(row.tokens))), *tokens]
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers))
