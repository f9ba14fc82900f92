"""The guesses of a step: which decoding sequences have some, and how many each may feed."""

from __future__ import annotations

from collections.abc import Iterable

from worker.scheduling.kv import KVAccount
from worker.scheduling.lookup.context_lookup import ContextLookup
from worker.scheduling.sequence import Sequence

STEP_ROWS = 16
"""Tokens of all decoding sequences in one step, guesses included: from about this number on a CPU computes each token
at the same rate, alone or beside others, so that guesses gain nothing."""


class Lookup:
    """`most` guesses of a sequence in one step; none with 0."""

    def __init__(self, account: KVAccount, most: int = 0) -> None:
        self.most = most
        self._account = account

    def any(self, sequences: Iterable[Sequence]) -> bool:
        """True if one of the sequences has guesses."""
        return self.most > 0 and any(self._guesses(sequence) for sequence in sequences)

    def guesses(self, sequences: list[Sequence], budget: int) -> dict[int, list[int]]:
        """The guesses of the sequences that decode in this step, by sid, with `budget` tokens for both."""
        room = min(STEP_ROWS, budget) - len(sequences)
        if self.most < 1 or room < 1:
            return {}
        found = {sequence.sid: (sequence, guesses) for sequence in sequences if (guesses := self._guesses(sequence))}
        each = room // len(found) if found else 0
        return {
            sid: guesses[:each]
            for sid, (sequence, guesses) in found.items()
            if each and self._account.reserve(sid, sequence.cached + 1 + len(guesses[:each]))
        }

    def verified(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        """Take note of a step's outcome."""
        if sequence.lookup is not None:
            sequence.lookup.verified(sequence, guessed, accepted, self._most(sequence))

    def _most(self, sequence: Sequence) -> int:
        wanted = sequence.sampling.lookup
        return self.most if wanted is None else min(self.most, wanted)

    def _guesses(self, sequence: Sequence) -> list[int]:
        # The last token of all is sampled, never fed.
        most = min(self._most(sequence), sequence.most_tokens - len(sequence.output) - 1)
        if most < 1:
            return []
        if sequence.lookup is None:
            sequence.lookup = ContextLookup(sequence.prediction)
        guesses = sequence.lookup.guesses(sequence, most)
        if sequence.constraint is not None:
            guesses = sequence.constraint.guesses(guesses)
        return guesses[:most]
