"""Guesses of the next tokens, looked up in a sequence's own context.

Where the last tokens of a context have occurred in it before, the tokens that came after them are guessed to come
again. A step feeds the guesses behind the last token and samples after each of them. Those that equal what was sampled
before them are kept, so the output is the same with guesses and without. A wrong guess costs part of a step; therefore
guesses grow longer while they are right, and rest while they are wrong.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from worker.scheduling.lookup.prediction import NGRAM, PAST_TOKENS, Prediction, Tokens

CANDIDATES = 8
"""Latest occurrences among which the one with the longest common past is chosen."""
PREDICTED_CANDIDATES = 32
"""Occurrences in a request's prediction that are compared beside them, from the place on that was followed last."""
FIRST_GUESSES = 4
LONGEST_REST = 64
"""Tokens without a guess, at most, after guesses that were wrong."""


class Context(Protocol):
    """The tokens that are looked through: a sequence."""

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        ...

    def context(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output."""
        ...


class ContextLookup:
    """The guesses of one sequence, and how many of them were right."""

    def __init__(self, prediction: Prediction | None = None) -> None:
        """`prediction` is looked through as if its tokens had once come after the prompt's end."""
        self._tokens = np.empty(0, dtype=np.int32)
        self._prediction = prediction
        self._followed = 0
        """The place of the prediction from which it was guessed last."""
        self._length = 0
        self._guessed_at, self._guesses = -1, list[int]()
        self._most, self._misses, self._rest_until = FIRST_GUESSES, 0, 0

    def guesses(self, context: Context, most: int) -> list[int]:
        """The tokens that may come next, `most` at most; the same list until the context grows."""
        if context.length != self._guessed_at:
            self._guessed_at = context.length
            self._guesses = [] if context.length < self._rest_until else self._find(context, min(most, self._most))
        return self._guesses

    def verified(self, context: Context, guessed: int, accepted: int, most: int) -> None:
        """Take note that `accepted` of `guessed` tokens were right; `context` has grown by them."""
        if accepted == guessed:
            self._most, self._misses = min(most, 2 * max(self._most, guessed)), 0
        elif accepted:
            self._most, self._misses = max(2, accepted + 1), 0
        else:
            self._misses += 1
            self._most = 2
            self._rest_until = context.length + min(LONGEST_REST, 2**self._misses)

    def _find(self, context: Context, most: int) -> list[int]:
        tokens = self._read(context)
        end = len(tokens)
        if end < NGRAM or most < 1:
            return []
        # An occurrence is the index after it; the last one is the context's own end.
        found = np.flatnonzero(tokens[NGRAM - 1 : end - 1] == tokens[end - 1]) + NGRAM
        for back in range(2, NGRAM + 1):
            found = found[tokens[found - back] == tokens[end - back]]
        last = tokens[-PAST_TOKENS:]
        past, best = max(
            ((_past(tokens, index, last), index) for index in found[-CANDIDATES:].tolist()), default=(0, 0)
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

    def _read(self, context: Context) -> Tokens:
        """The context, of which only what is new is copied."""
        if context.length > len(self._tokens):
            larger = np.empty(2 * context.length, dtype=np.int32)
            larger[: self._length] = self._tokens[: self._length]
            self._tokens = larger
        self._tokens[self._length : context.length] = context.context(self._length, context.length)
        self._length = context.length
        return self._tokens[: self._length]


def _past(tokens: Tokens, index: int, last: Tokens) -> int:
    """How many tokens before `index` equal the `last` ones of the context."""
    count = min(index, len(last))
    same = tokens[index - count : index] == last[len(last) - count :]
    return count if same.all() else int(np.argmin(same[::-1]))
