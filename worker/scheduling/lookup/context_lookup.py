"""Guesses of the next tokens, looked up in a sequence's own context.

Where the last tokens of a context have occurred in it before, the tokens that came after them are guessed to come
again. A step feeds the guesses behind the last token and samples after each of them. Those that equal what was sampled
before them are kept, so the output is the same with guesses and without. A wrong guess costs part of a step; therefore
guesses grow longer while they are right, and rest while they are wrong.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

NGRAM = 3
"""Tokens that must have occurred before in the same order: shorter ones repeat in any text."""
CANDIDATES = 8
"""Latest occurrences among which the one with the longest common past is chosen."""
PAST_TOKENS = 32
"""Tokens of a common past that are compared."""
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

    def __init__(self) -> None:
        self._tokens = np.empty(0, dtype=np.int32)
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
        if end <= NGRAM or most < 1:
            return []
        # An occurrence is the index after it; the last one is the context's own end.
        found = np.flatnonzero(tokens[NGRAM - 1 : end - 1] == tokens[end - 1]) + NGRAM
        for back in range(2, NGRAM + 1):
            found = found[tokens[found - back] == tokens[end - back]]
        if not len(found):
            return []
        best = max(found[-CANDIDATES:].tolist(), key=lambda index: (self._past(tokens, index), index))
        # A text that repeats itself right now goes on with what is guessed.
        return np.resize(tokens[best : best + most], most).tolist()

    @staticmethod
    def _past(tokens: np.ndarray[tuple[int], np.dtype[np.int32]], index: int) -> int:
        """How many tokens before `index` equal those before the end."""
        count = min(index, PAST_TOKENS)
        same = tokens[index - count : index] == tokens[len(tokens) - count :]
        return count if same.all() else int(np.argmin(same[::-1]))

    def _read(self, context: Context) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The context, of which only what is new is copied."""
        length = context.length
        if length > len(self._tokens):
            larger = np.empty(2 * length, dtype=np.int32)
            larger[: self._length] = self._tokens[: self._length]
            self._tokens = larger
        self._tokens[self._length : length] = context.context(self._length, length)
        self._length = length
        return self._tokens[:length]
