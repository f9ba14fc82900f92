"""The launch of the next decode step before the host has read this one's tokens, on a rank without peers.

The tokens stay on the device as the next step's input. A launched row counts only if the next command feeds the same
token at the same position. Other launched rows are dropped, and rows that joined are run apart. Nothing is committed
before that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.torch.graphs import DecodeGraphs
from worker.models.served import Row
from worker.tensors import sent

UNKNOWN = 0
"""A token that only the device knows."""


class RunAhead:
    """At most one decode step that was launched early."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs
        self._places: dict[int, tuple[int, int]] = {}
        """Sequence → position of its token in the step, and its row of the logits."""
        self._tokens: dict[int, int] = {}
        """Sequence → the token that was fed, once the host has read it."""
        self._logits: Tensor | None = None

    def following(self, rows: list[Row]) -> list[Row]:
        """The decode step after `rows`, in the order that the engine gives it; empty where none can be launched."""
        following = [Row(row.sid, [UNKNOWN], row.extent.end, True) for row in sorted(rows, key=lambda row: row.sid)]
        fits = all(row.extent.end <= self._graphs.max_context for row in following)
        return following if fits and all(row.sample for row in rows) and self._graphs.takes(following) else []

    def launch(self, rows: list[Row], following: list[Row], tokens: Tensor) -> None:
        """Launch `following` with the device's `tokens` of `rows`, in their order."""
        number = {row.sid: index for index, row in enumerate(rows)}
        order = sent([number[row.sid] for row in following], torch.int64, tokens.device)
        self._logits = self._graphs.run(following, tokens.index_select(0, order))
        self._places = {row.sid: (row.offset, index) for index, row in enumerate(following)}
        self._tokens = {}

    def note_tokens(self, sids: list[int], tokens: list[int]) -> None:
        """The host has read what was sampled."""
        self._tokens = {sid: token for sid, token in zip(sids, tokens, strict=True) if sid in self._places}

    def settle(self, rows: list[Row]) -> None:
        """The next step is `rows`: whatever else was launched is in vain, and its room is free for others."""
        covered = self.covered(rows)
        self._graphs.settle([row.extent for row in covered])
        if not covered:
            self.forget()

    def covered(self, rows: list[Row]) -> list[Row]:
        """Those of `rows` that were launched early, with the very tokens that they feed."""
        return [row for row in rows if self._covers(row)]

    def take(self, covered: list[Row]) -> Tensor:
        """Their logits (rows, vocabulary), the caller's to keep."""
        assert self._logits is not None
        where = sent([self._places[row.sid][1] for row in covered], torch.int64, self._logits.device)
        selected = self._logits.index_select(0, where)
        self.forget()
        return selected

    @staticmethod
    def merged(rows: list[Row], covered: list[Row], early: Tensor, rest: Tensor) -> Tensor:
        """Logits of the sampled rows of `rows` in their order: `early` those of `covered`, `rest` those of the
        others."""
        ours = {row.sid for row in covered}
        sampled = [row.sid in ours for row in rows if row.sample]
        out = early.new_empty(len(sampled), early.shape[1])
        for part, which in ((early, True), (rest, False)):
            places = [index for index, is_early in enumerate(sampled) if is_early is which]
            out.index_copy_(0, sent(places, torch.int64, out.device), part)
        return out

    def forget(self) -> None:
        """Discard the step that was launched early."""
        self._places = {}
        self._tokens = {}
        self._logits = None

    def _covers(self, row: Row) -> bool:
        if not row.sample or row.sid not in self._tokens:
            return False
        return row.tokens == [self._tokens[row.sid]] and row.offset == self._places[row.sid][0]
