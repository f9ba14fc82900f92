"""Guesses of the next tokens, looked up in a sequence's own context.

Where the last tokens of a context have occurred in it before, the tokens that came after them are guessed to come
again. A step feeds the guesses behind the last token and samples after each of them. Those that equal what was sampled
before them are kept, so the output is the same with guesses and without. A wrong guess costs part of a step; therefore
guesses grow longer while they are right, and rest while they are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from worker.scheduling.prediction import NGRAM, PAST_TOKENS, Prediction, Tokens

if TYPE_CHECKING:  # a sequence has its lookup
    from worker.scheduling.kv_cache import KVAccount
    from worker.scheduling.sequence import Sequence

CANDIDATES = 8
"""Latest occurrences among which the one with the longest common past is chosen."""
PREDICTED_CANDIDATES = 32
"""Occurrences in a request's prediction that are compared beside them, from the place on that was followed last."""
FIRST_GUESSES = 4
LONGEST_REST = 64
"""Tokens without a guess, at most, after guesses that were wrong."""


STEP_ROWS = 16
"""Tokens of all decoding sequences in one step, guesses included: from about this number on a CPU computes each token
at the same rate, alone or beside others, so that guesses gain nothing."""


class ContextLookup:
    """The guesses of one sequence, and how many of them were right."""

    def __init__(self, prediction: Prediction | None = None) -> None:
        """`prediction` is looked through as if its tokens had once come after the prompt's end."""
        self._tokens = np.empty(0, dtype=np.int32)
        self._prediction = prediction
        self._followed = 0
        """The place of the prediction from which it was guessed last."""
        self._length = 0
        self._guessed_at = -1
        self._guesses: list[int] = []
        self._most = FIRST_GUESSES
        self._misses = 0
        self._rest_until = 0

    def guesses(self, context: Sequence, most: int) -> list[int]:
        """The tokens that may come next, `most` at most; the same list until the context grows."""
        if context.length != self._guessed_at:
            self._guessed_at = context.length
            self._guesses = [] if context.length < self._rest_until else self._find(context, min(most, self._most))
        return self._guesses

    def verified(self, context: Sequence, guessed: int, accepted: int, most: int) -> None:
        """Take note that `accepted` of `guessed` tokens were right; `context` has grown by them."""
        if accepted == guessed:
            self._most = min(most, 2 * max(self._most, guessed))
            self._misses = 0
        elif accepted:
            self._most = max(2, accepted + 1)
            self._misses = 0
        else:
            self._misses += 1
            self._most = 2
            self._rest_until = context.length + min(LONGEST_REST, 2**self._misses)

    def _find(self, context: Sequence, most: int) -> list[int]:
        tokens = self._read(context)
        end = len(tokens)
        if end < NGRAM or most < 1:
            return []
        # An occurrence is the index after it; the last one is the context's own end.
        places = np.flatnonzero(tokens[NGRAM - 1 : end - 1] == tokens[end - 1]) + NGRAM
        for back in range(2, NGRAM + 1):
            places = places[tokens[places - back] == tokens[end - back]]
        last = tokens[-PAST_TOKENS:]
        past, best = max(
            ((_past(tokens, index, last), index) for index in places[-CANDIDATES:].tolist()), default=(0, 0)
        )
        if self._prediction is not None:
            predicted = self._prediction.tokens
            there = ((_past(predicted, index, last), index) for index in self._predicted(self._prediction, last))
            longer, index = max(there, default=(0, 0))
            if longer > past:
                self._followed = index
                return predicted[index : index + most].tolist()
        # A text that repeats itself right now goes on with what is guessed.
        return np.resize(tokens[best : best + most], most).tolist() if past else []

    def _predicted(self, prediction: Prediction, last: Tokens) -> list[int]:
        """The occurrences in the prediction that are compared."""
        starts = prediction.starts(last[-NGRAM:].tolist())
        near = int(starts.searchsorted(self._followed - NGRAM))
        some = starts[max(0, near - CANDIDATES) : near + PREDICTED_CANDIDATES].tolist()
        return [start + NGRAM for start in some if start + NGRAM < len(prediction.tokens)]

    def _read(self, context: Sequence) -> Tokens:
        """The context, of which only what is new is copied."""
        if context.length > len(self._tokens):
            larger = np.empty(2 * context.length, dtype=np.int32)
            larger[: self._length] = self._tokens[: self._length]
            self._tokens = larger
        self._tokens[self._length : context.length] = context.context(self._length, context.length)
        self._length = context.length
        return self._tokens[: self._length]


def _past(tokens: Tokens, index: int, last: Tokens) -> int:
    """The number of tokens before `index` that equal the `last` ones of the context."""
    count = min(index, len(last))
    same = tokens[index - count : index] == last[len(last) - count :]
    return count if same.all() else int(np.argmin(same[::-1]))


class PromptLookup:
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
        by_sid = {sequence.sid: (sequence, guesses) for sequence in sequences if (guesses := self._guesses(sequence))}
        each = room // len(by_sid) if by_sid else 0
        return {
            sid: guesses[:each]
            for sid, (sequence, guesses) in by_sid.items()
            if each and self._account.reserve(sid, sequence.cached + 1 + len(guesses[:each]))
        }

    def verified(self, sequence: Sequence, guessed: int, accepted: int) -> None:
        """Take note of a step's outcome."""
        if sequence.lookup is not None:
            sequence.lookup.verified(sequence, guessed, accepted, self._most(sequence))

    def _most(self, sequence: Sequence) -> int:
        limit = sequence.sampling.lookup
        return self.most if limit is None else min(self.most, limit)

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
