"""The engine: one model's running batch on this rank, changed by every command and extended by every forward.

Every rank of a group runs the same engine over the same commands. Only rank 0 samples; the others receive its
tokens.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from control.commands import BatchChange, GenerateStep, GenerateStepWithImages, StepRow
from control.errors import RankError, RankErrorKind
from worker.collective import Collective
from worker.collective.base import sendable
from worker.engine.scoring import PromptScorer, PromptScores, ScoreTarget
from worker.kv.base import KVStore
from worker.models.served import Row, ServedModel, flatten
from worker.native.library import Threads

if TYPE_CHECKING:  # they import torch, or what images need
    from worker.engine.images import EngineImages
    from worker.engine.torch.ahead import RunAhead
    from worker.engine.torch.graphs import DecodeGraphs

Logits = Any
"""(rows, vocabulary): an array where the forward is C++, else a tensor on the model's device."""

NO_TOKEN = -1
"""Broadcast by rank 0 for a row that could not be sampled."""
REJECTED = -2
"""Broadcast by rank 0 for a position of a row that follows a guess which was wrong."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Row i of `logits` (rows, vocabulary) is what the next token of sequence `sids[i]` is sampled from. A sequence is
    there once for its last token and once for each guess."""

    sids: list[int]
    logits: Logits
    scores: PromptScores = field(default_factory=PromptScores)
    threads: Threads | None = None
    """Those of the model, which sample what they have computed; None where torch does both."""


class Engine:
    def __init__(self, model: ServedModel, store: KVStore, collective: Collective) -> None:
        self.model = model
        self.store = store
        self.collective = collective
        self._check = CommandCheck(store, model.vocab_size, self.error)
        self.graphs, self.ahead = _graphs(model, store, collective)
        self._pending: dict[int, int] = {}
        """Sequence → the token sampled last, which it feeds in its next row."""
        self.forwards = 0
        """Number of finished forwards of all commands."""
        self.images = _images(model)
        """The images of the running sequences; None where the model takes text only."""

    def step(self, command: GenerateStep) -> Step:
        return Step(self, command)

    @property
    def verifies_guesses(self) -> bool:
        """True if a row may have guesses: its logits have the same bits as those of its tokens one by one."""
        return self.model.batch_invariant

    def prepare(self) -> None:
        """Make ready for an epoch's steps; every rank of the group does this at the same time."""
        if self.model.device != "cpu":
            from worker.engine.torch.graphs import warm_up  # only here: it imports torch

            warm_up(self.model, self.store, captured=self.graphs is not None)
        if self.graphs is not None:
            self.graphs.prepare()

    def leave(self) -> None:
        """Forget every sequence and the group, before it is destroyed."""
        self.clear()
        if self.graphs is not None:
            self.graphs.release()

    def clear(self) -> None:
        if self.ahead is not None:
            self.ahead.forget()
        self._pending.clear()
        if self.images is not None:
            self.images.clear()
        self.store.clear()

    def join(self, collective: Collective) -> None:
        """Go on in a new epoch's group: weights stay, sequences are forgotten (their ranks may differ by a step)."""
        self.leave()
        self.model.join(collective)
        self.collective = collective

    def change(self, command: GenerateStep) -> list[Row]:
        """Apply a command to the batch; returns the rows of its first forward: the continuing sequences by ascending
        sid, then the command's rows in their order. The whole command is checked before any change, by state that is
        equal on all ranks. Raises RankError: `bad_request` or `forward_failed`, with nothing changed."""
        rows = self._rows(command.change)
        self._check.images(command, self.images)
        self._settle(rows)
        self._make_room(command.change)
        if self.images is not None and isinstance(command, GenerateStepWithImages):
            self.images.add(command.images)
        return rows

    def decode_again(self) -> list[Row]:
        """The rows of a further forward of the same command: each sequence that was sampled feeds its token."""
        rows = self._continuing(frozenset())
        self._check.room(rows)
        self._settle(rows)
        return rows

    def _rows(self, change: BatchChange) -> list[Row]:
        self._check.shape(change)
        begun = self._check.prefixes(change)
        left_sids = set(change.left)
        explicit = [row.sid for row in change.rows]
        rows = self._continuing(left_sids.union(change.paused, change.kept, explicit))
        rows += self._check.rows(change, begun, self.verifies_guesses)
        self._check.room(rows, left_sids, set(change.dropped_snapshots) - left_sids)
        return rows

    def _continuing(self, others: Set[int]) -> list[Row]:
        """The rows of the sequences that decode by themselves, all but `others`."""
        return [
            Row(sid, [self._pending[sid]], self.store.length(sid) or 0, True)
            for sid in sorted(self._pending.keys() - others)
        ]

    def _settle(self, rows: list[Row]) -> None:
        """Release the room of rows that were launched early and are not among `rows`."""
        if self.ahead is not None:
            self.ahead.settle(rows)

    def _make_room(self, change: BatchChange) -> None:
        """Forget who left and let newcomers begin with what others have; donors that left come last."""
        for sid in (*change.left, *change.kept):
            self._pending.pop(sid, None)
        if self.images is not None:
            self.images.drop([*change.left, *change.kept])
        donors = {prefix.donor: prefix for prefix in change.prefixes}  # the last one of each donor
        left_sids = set(change.left)
        for sid in left_sids - donors.keys():
            self.store.drop(sid)
        for prefix in change.prefixes:
            if self.store.length(prefix.sid) is None:  # else a run of this command that failed has done it
                take_over = prefix.donor in left_sids and donors[prefix.donor] == prefix
                whole = {"take_over": take_over, "snapshots": prefix.snapshots}
                self.store.fork(prefix.sid, prefix.donor, prefix.count, **whole)
        for sid in change.dropped_snapshots:
            self.store.drop_snapshots(sid)

    def forward(self, rows: list[Row], targets: Mapping[int, ScoreTarget]) -> tuple[Logits, PromptScores]:
        """The logits of the sampled rows, and the scores of `targets`; the rows without guesses are cached then. Raises
        RankError: `forward_failed`, caused by the first error. Nothing is cached then, and the same command may be run
        again."""
        places = [(row.sid, position) for row in rows for position in row.scored]
        scorer = PromptScorer(targets, places, self.model.threads) if targets else None
        covered = [] if self.ahead is None else self.ahead.covered(rows)
        remaining = rows if not covered else [row for row in rows if row not in covered]
        early = self.ahead.take(covered) if covered and self.ahead is not None else None
        try:
            logits = self._launch(remaining, covered, scorer) if remaining else None
        except Exception as error:
            shape = ", ".join(f"{row.sid}: {len(row.tokens)} at {row.offset}" for row in rows)
            raise self.error("forward_failed", f"{type(error).__name__}: {error} (rows {shape})") from error
        self.store.commit([row.extent for row in rows if not row.guesses])
        self.forwards += 1
        for row in rows:
            self._pending.pop(row.sid, None)
            if row.snapshot:
                self.store.snapshot(row.sid)
        if early is not None:
            assert self.ahead is not None
            logits = early if logits is None else self.ahead.merged(rows, covered, early, logits)
        assert logits is not None, "there is at least one row"
        scores = PromptScores() if scorer is None else scorer.scores
        if self.images is not None:
            scores.failed.update(self.images.failures)
        return logits, scores

    def _launch(self, rows: list[Row], beside: list[Row], scorer: PromptScorer | None) -> Logits:
        if not beside and self.graphs is not None and self.graphs.takes(rows):
            # A copy: the graph may run again before the sampler has done with these.
            return self.graphs.run(rows).clone()
        cache = self.store.begin([row.extent for row in rows], [row.extent for row in beside])
        if self.images is None:
            batch = flatten(rows, cache)
        else:
            image_rows = self.images.rows(rows, self.collective)
            batch = flatten(rows, cache, self.images.axes(rows), image_rows, self.images.ends(rows))
        return self.model.forward(batch, None if scorer is None else scorer.window)

    def run_ahead(self, rows: list[Row], tokens: Any) -> None:
        """Launch the decode step after `rows` with `tokens`, which only the device knows; where this is possible."""
        if self.ahead is None or self._pending:
            return
        following = self.ahead.following(rows)
        if following and self._check.needed(following) <= self.store.capacity_tokens:
            self.ahead.launch(rows, following, tokens)

    def broadcast(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers on every rank."""
        try:
            # A rank alone has nobody to tell, and a GPU is not asked to hand back what the host has just put there.
            device = self.model.device if self.collective.world_size > 1 else "cpu"
            return self.collective.broadcast(sendable(np.array(numbers, np.int64), device)).tolist()
        except Exception as error:
            raise self.error(
                "forward_failed", f"the tokens could not be broadcast: {type(error).__name__}: {error}"
            ) from error

    def sampled(self, rows: list[Row], tokens: list[int]) -> None:
        """`tokens` come next, one for each sampled position of `rows`: each sequence that has one decodes by itself. Of
        a row with guesses the accepted ones are cached now."""
        sids = [row.sid for row in rows for _ in range(row.samples)]
        if self.ahead is not None:
            self.ahead.note_tokens(sids, tokens)
        sampled = [(sid, token) for sid, token in zip(sids, tokens, strict=True) if token >= 0]
        self._pending.update(sampled)  # the last of a sequence stays
        counts = Counter(sid for sid, _ in sampled)
        right = {row.sid: max(0, counts[row.sid] - 1) for row in rows if row.guesses}
        if guessed := [row.extent_up_to(right[row.sid]) for row in rows if row.guesses]:
            self.model.accept(right)
            self.store.commit(guessed)  # of nothing, it would give back what was reserved for the step launched ahead

    def error(self, kind: RankErrorKind, message: str) -> RankError:
        return RankError(self.collective.rank, kind, message)


def _graphs(model: ServedModel, store: KVStore, collective: Collective) -> tuple[DecodeGraphs | None, RunAhead | None]:
    """The captured decode steps of a GPU, and what launches one of them early on a rank alone."""
    if model.device == "cpu":
        return None, None
    from worker.engine.torch.ahead import RunAhead  # only here: they import torch
    from worker.engine.torch.graphs import graphs_for

    graphs = graphs_for(model, store)
    return graphs, None if graphs is None or collective.world_size > 1 else RunAhead(graphs)


def _images(model: ServedModel) -> EngineImages | None:
    if model.tower is None:
        return None
    from worker.engine.images import EngineImages  # only here: few models take images

    return EngineImages(model.tower)


class CommandCheck:
    """Validation of a step command against the batch, by state that is equal on all ranks. Every method raises
    RankError, and changes nothing."""

    def __init__(self, store: KVStore, vocab_size: int, error: Callable[[RankErrorKind, str], RankError]) -> None:
        self._store = store
        self._vocab_size = vocab_size
        self._error = error

    def row(self, row: Row, cached: int | None) -> None:
        """Check that a row continues at the end of its sequence's cache, of `cached` positions."""
        sid = row.sid
        tokens = row.tokens
        offset = row.offset
        if not tokens:
            raise self._error("bad_request", f"sequence {sid} has a row without tokens")
        lowest = min(tokens)
        highest = max(tokens)
        if lowest < 0 or highest >= self._vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise self._error("bad_request", f"sequence {sid} has token {wrong}; the vocabulary has {self._vocab_size}")
        if cached is None and offset != 0:
            raise self._error(
                "forward_failed", f"sequence {sid} is unknown, so it must start at offset 0, not {offset}"
            )
        if cached is not None and offset != cached:
            raise self._error(
                "forward_failed", f"sequence {sid} has {cached} cached tokens, but its row says offset {offset}"
            )

    def guesses(self, row: Row, possible: bool) -> None:
        """That a row's guesses follow a token of its own, and can be verified here."""
        if not row.guesses:
            return
        if not 0 < row.guesses < len(row.tokens) or not row.sample:
            raise self._error(
                "bad_request",
                f"sequence {row.sid} has a row of {len(row.tokens)} tokens with {row.guesses} guesses: guesses follow "
                "a token, and the row is sampled",
            )
        if not possible:
            raise self._error("bad_request", f"sequence {row.sid} has guesses, which this rank can't verify")

    def scored(self, row: StepRow) -> range:
        """The positions of a row that are scored."""
        if row.scored is None:
            return range(0)
        positions = range(*row.scored)
        fed = range(row.offset, row.offset + len(row.tokens))
        if not positions or positions[0] not in fed or positions[-1] not in fed:
            raise self._error(
                "bad_request",
                f"positions {positions.start} to {positions.stop} of sequence {row.sid} can't be scored: its row has "
                f"{fed.start} to {fed.stop}",
            )
        return positions

    def rows(self, change: BatchChange, begun: Mapping[int, int], verifies: bool) -> list[Row]:
        """The change's rows. `begun` are the positions of sequences that begin with another's; `verifies` is True where
        guesses are possible."""
        rows: list[Row] = []
        for step_row in change.rows:
            row = Row(
                step_row.sid,
                step_row.tokens,
                step_row.offset,
                step_row.sample,
                self.scored(step_row),
                step_row.guesses,
                step_row.second,
                step_row.snapshot,
            )
            cached = None if row.sid in change.left else self._store.length(row.sid)
            self.row(row, begun.get(row.sid, cached))
            self.guesses(row, verifies)
            if row.snapshot and not self._store.cost.copy_tokens:
                raise self._error(
                    "bad_request", f"sequence {row.sid} keeps all its positions; there is nothing to copy"
                )
            rows.append(row)
        return rows

    def room(self, rows: list[Row], left: Set[int] = frozenset(), dropped: Iterable[int] = ()) -> None:
        """That `rows` fit, once `left` and the copies of the states of `dropped` have gone."""
        needed = self.needed(rows, left)
        needed -= sum(self._store.held(sid) - self._store.rounded(self._store.length(sid) or 0) for sid in dropped)
        if needed > self._store.capacity_tokens:
            raise self._error(
                "forward_failed",
                f"the step needs {needed} cached tokens, but there is room for {self._store.capacity_tokens}",
            )

    def needed(self, rows: list[Row], left: Set[int] = frozenset()) -> int:
        """Of the store's capacity, once `left` have gone and `rows` are there."""
        store = self._store
        resting = store.used_tokens - sum(store.held(sid) for sid in left)
        resting -= sum(store.rounded(store.length(row.sid) or 0) for row in rows if row.sid not in left)
        copies = store.cost.copy_tokens * sum(row.snapshot for row in rows)
        return resting + copies + sum(store.rounded(row.extent.end) for row in rows)

    def images(self, command: GenerateStep, images: EngineImages | None) -> None:
        """That the rows fit the command's images and those of earlier ones. `images` are the engine's, None where the
        model takes text only."""
        begins = isinstance(command, GenerateStepWithImages)
        if images is None:
            if begins:
                raise self._error("unsupported_arch", f"{command.model_id!r} takes text only; send no images")
            return
        new_images, most = (command.images, command.chunk_size) if begins else ((), None)
        if why := images.fault(new_images, command.change.rows, most):
            raise self._error("bad_request", why)

    def shape(self, change: BatchChange) -> None:
        """That the change contradicts neither itself nor what is known."""
        sids = [row.sid for row in change.rows]
        fed = set(sids)
        if len(fed) != len(sids):
            raise self._error("bad_request", f"a sequence has two rows in one step: {sorted(sids)}")
        for state, resting in (("paused", change.paused), ("kept", change.kept)):
            for sid in resting:
                if sid in fed or self._store.length(sid) is None:
                    why = "has a row in the same step" if sid in fed else "is not known here"
                    raise self._error("bad_request", f"sequence {sid} can't be {state}: it {why}")

    def prefixes(self, change: BatchChange) -> dict[int, int]:
        """The number of shared positions of each sequence that begins with another's."""
        begun: dict[int, int] = {}
        fed = {row.sid for row in change.rows} if change.prefixes else set[int]()
        for prefix in change.prefixes:
            sid = prefix.sid
            donor = prefix.donor
            count = prefix.count
            length = self._store.length(sid)
            has = self._store.length(donor)
            again = length == count  # after a failed forward the same command may be run again
            fault = None
            if not self._store.supports_prefix_sharing:
                fault = "this model's cache can't be cut"
            elif sid not in fed or sid in begun or sid in change.left:
                fault = "it must join with one row and one prefix"
            elif length is not None and not again:
                fault = f"it has {length} cached tokens already"
            elif count < 1 or not (again or (has is not None and count <= has)):
                fault = f"that has {has or 0} cached tokens"
            elif not again and not self._store.can_fork(donor, count):
                fault = "its recurrent state, or what its windows see, was not kept there"
            if fault is not None:
                raise self._error(
                    "bad_request", f"sequence {sid} can't begin with {count} tokens of sequence {donor}: {fault}"
                )
            begun[sid] = count
        return begun


class Step:
    """One command's forwards on this rank: `forward`, then `agree`, and again while `agree` returns True.

    A context manager: if rank 0 fails between the two, it broadcasts NO_TOKEN for every row, because peers wait. The
    rows are cached then.
    """

    def __init__(self, engine: Engine, command: GenerateStep) -> None:
        self.command = command
        self.checksum = command.seq
        """Checksum over the batches and tokens; equal on all ranks that ran the same."""
        self.forwards = 0
        self.tokens: list[int] = []
        """Tokens of the sampled rows, in their order, on which all ranks agreed last."""
        self.rank = engine.collective.rank
        self._engine = engine
        self._rows: list[Row] = []
        self._sids: list[int] = []
        self._owes_tokens = False

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self._owes_tokens and self.rank == 0:
            try:
                self._agreed([NO_TOKEN] * len(self._sids), more=False)
            except RankError as broken:
                raise broken from error

    def forward(self, targets: Mapping[int, ScoreTarget] | None = None) -> Forward:
        """Run the command's next forward, and score `targets`. Raises RankError as Engine.change and Engine.forward
        do."""
        engine = self._engine
        self._rows = engine.decode_again() if self.forwards else engine.change(self.command)
        if not self._rows:
            return Forward([], engine.model.no_logits, threads=engine.model.threads)
        logits, scores = engine.forward(self._rows, targets or {})
        self.forwards += 1
        self._sids = [row.sid for row in self._rows for _ in range(row.samples)]
        self._owes_tokens = bool(self._sids)
        return Forward(self._sids, logits, scores, engine.model.threads)

    def run_ahead(self, tokens: Any) -> None:
        """The forward's `tokens`, a tensor (rows), are on the device and not here yet: launch the next decode step with
        them, on a rank alone with a GPU. None where they are not on the device."""
        if tokens is not None:
            self._engine.run_ahead(self._rows, tokens)

    def agree(self, tokens: Sequence[int] = (), *, more: bool = False) -> bool:
        """Broadcast the forward's tokens, NO_TOKEN for a row that has none, REJECTED after a wrong guess; returns True
        if another forward follows. Rank 0 gives both, and may want `more` only of a command with `repeat`. Raises
        RankError: `forward_failed` if the broadcast fails."""
        if not self._rows:
            return False
        token_list = list(tokens) if self.rank == 0 else [NO_TOKEN] * len(self._sids)
        if len(token_list) != len(self._sids):
            message = f"the sampler gave {len(token_list)} tokens for {len(self._sids)} rows"
            raise self._engine.error("forward_failed", message)
        return self._agreed(token_list, more)

    def _agreed(self, tokens: list[int], more: bool) -> bool:
        self._owes_tokens = False
        if self._sids:
            repeat = self.command.repeat
            numbers = self._engine.broadcast([*tokens, int(more)] if repeat else tokens)
            tokens = numbers[:-1] if repeat else numbers
            more = repeat and bool(numbers[-1])
            self._engine.sampled(self._rows, tokens)
        self.tokens = tokens
        self.checksum = checksum(self.checksum, self._rows, tokens)
        return more and bool(self._sids)


def checksum(before: int, rows: list[Row], tokens: list[int]) -> int:
    """crc32 over what was before (the seq, then the forward before this one), each row's (sid, offset, count) and the
    tokens, as little-endian 64-bit numbers. A rank that ran something else has another one."""
    numbers = [before, *(part for row in rows for part in (row.sid, row.offset, len(row.tokens))), *tokens]
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers))
