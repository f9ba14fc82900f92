"""Validation of a step command against the batch. The rules use only state that is equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set

from control.commands import BatchChange, GenerateStep, GenerateStepWithImages, StepRow
from control.errors import RankError, RankErrorKind
from worker.engine.images import EngineImages
from worker.kv.base import KVStore
from worker.models.batch import Row


class CommandCheck:
    """Every method raises RankError, and changes nothing."""

    def __init__(self, store: KVStore, vocab_size: int, error: Callable[[RankErrorKind, str], RankError]) -> None:
        self._store = store
        self._vocab_size = vocab_size
        self._error = error

    def row(self, row: Row, cached: int | None) -> None:
        """That a row goes on where its sequence's cache, of `cached` positions, ends."""
        sid, tokens, offset = row.sid, row.tokens, row.offset
        if not tokens:
            raise self._error("bad_request", f"sequence {sid} has a row without tokens")
        lowest, highest = min(tokens), max(tokens)
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
        positions, fed = range(*row.scored), range(row.offset, row.offset + len(row.tokens))
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
            if row.snapshot and not self._store.state_tokens:
                raise self._error("bad_request", f"sequence {row.sid} has no recurrent state to keep a copy of")
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
        kept = store.used_tokens - sum(store.held(sid) for sid in left)
        kept -= sum(store.rounded(store.length(row.sid) or 0) for row in rows if row.sid not in left)
        states = store.state_tokens * sum(row.snapshot for row in rows)
        return kept + states + sum(store.rounded(row.extent.end) for row in rows)

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
        for what, resting in (("paused", change.paused), ("kept", change.kept)):
            for sid in resting:
                if sid in fed or self._store.length(sid) is None:
                    why = "has a row in the same step" if sid in fed else "is not known here"
                    raise self._error("bad_request", f"sequence {sid} can't be {what}: it {why}")

    def prefixes(self, change: BatchChange) -> dict[int, int]:
        """How many positions each sequence has that begins with another's."""
        begun: dict[int, int] = {}
        fed = {row.sid for row in change.rows} if change.prefixes else set[int]()
        for prefix in change.prefixes:
            sid, donor, count = prefix.sid, prefix.donor, prefix.count
            own, has = self._store.length(sid), self._store.length(donor)
            again = own == count  # after a failed forward the same command may be run again
            fault = None
            if not self._store.supports_prefix_sharing:
                fault = "this model's cache can't be cut"
            elif sid not in fed or sid in begun or sid in change.left:
                fault = "it must join with one row and one prefix"
            elif own is not None and not again:
                fault = f"it has {own} cached tokens already"
            elif count < 1 or not (again or (has is not None and count <= has)):
                fault = f"that has {has or 0} cached tokens"
            elif not again and not self._store.can_fork(donor, count):
                fault = "no recurrent state was kept there"
            if fault is not None:
                raise self._error(
                    "bad_request", f"sequence {sid} can't begin with {count} tokens of sequence {donor}: {fault}"
                )
            begun[sid] = count
        return begun
