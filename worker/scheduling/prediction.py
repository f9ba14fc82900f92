"""A request's predicted content: where its n-grams are, and how much of it an answer has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from threading import Thread

import numpy as np

NGRAM = 3
"""Tokens that must have occurred before in the same order: shorter ones repeat in any text."""
PAST_TOKENS = 32
"""Tokens of a common past that are compared."""

INDEXED_AT_ONCE = 8192
"""Tokens that are indexed where they are first looked up: a fraction of a millisecond. More are indexed beside the
steps: 100,000 tokens take 14 ms."""

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
Places = np.ndarray[tuple[int], np.dtype[np.int64]]
Index = tuple[Places, Places]
"""The numbers of a text's n-grams in ascending order, and where each begins."""

_ID_BITS = 21
"""Bits of a token id in an n-gram's number: no vocabulary has two million tokens."""


class Prediction:
    """The tokens that are expected to come after a prompt. It never changes: all choices of a request share it.

    Without an index a lookup reads all of the tokens: 0.2 ms for 100,000. It finds the same.
    """

    def __init__(self, prompt: Sequence[int], predicted: Sequence[int]) -> None:
        self.predicted = predicted
        self._before = prompt[-PAST_TOKENS:]
        self._index: Index | None = None
        self._indexing = False

    @cached_property
    def tokens(self) -> Tokens:
        """The end of the prompt and the predicted tokens."""
        # From a list of 100,000 `fromiter` takes two thirds of the time of `array`.
        parts = [np.fromiter(part, dtype=np.int32, count=len(part)) for part in (self._before, self.predicted)]
        return np.concatenate(parts)

    def starts(self, gram: Sequence[int]) -> Places:
        """The indices in `tokens` at which the n-gram begins, in ascending order."""
        index = self._indexed()
        if index is None:
            return self._scan(gram)
        number = 0
        for token in gram:
            number = number << _ID_BITS | token
        numbers, starts = index
        low = int(numbers.searchsorted(number))
        if low == len(numbers) or numbers[low] != number:
            return starts[:0]
        return starts[low : int(numbers.searchsorted(number, "right"))]

    def _indexed(self) -> Index | None:
        """The index; None while a thread makes it."""
        if self._index is None and not self._indexing:
            if len(self.tokens) <= INDEXED_AT_ONCE:
                self._make_index()
            else:
                self._indexing = True
                Thread(target=self._make_index, name="prediction", daemon=True).start()
        return self._index

    def _make_index(self) -> None:
        grams = np.zeros(max(0, len(self.tokens) - NGRAM + 1), dtype=np.int64)
        for offset in range(NGRAM):
            grams = grams << _ID_BITS | self.tokens[offset : offset + len(grams)]
        starts = np.argsort(grams, kind="stable")
        self._index = grams[starts], starts

    def _scan(self, gram: Sequence[int]) -> Places:
        begins = self.tokens[: 1 - NGRAM] == gram[0]
        for offset in range(1, NGRAM):
            begins &= self.tokens[offset : offset + len(begins)] == gram[offset]
        return np.flatnonzero(begins)

    def after(self, place: int, gram: Sequence[int]) -> int | None:
        """The first place of the predicted tokens from `place` on where `gram` begins; None if there is none."""
        starts = self.starts(gram)
        begin = len(self._before)
        first = int(starts.searchsorted(begin + place)) if len(starts) else 0
        return int(starts[first]) - begin if first < len(starts) else None


class Accepted:
    """Counts the predicted tokens that an answer has in the same order, as it grows.

    Both are followed together from their beginnings. Where they part, they meet again at the next place of the
    prediction that has the answer's last three tokens. The count is a function of the two alone, so a recovery counts
    alike.
    """

    def __init__(self, prediction: Prediction) -> None:
        self.count = 0
        self._prediction = prediction
        self._read = 0
        """Tokens of the answer that have been followed."""
        self._place = self._matched = 0
        self._lost = False

    def follow(self, output: list[int]) -> None:
        """Count on to the end of the answer `output`: its new tokens are read, each with one lookup at most."""
        predicted = self._prediction.predicted
        for at in range(self._read, len(output)):
            if not self._lost and self._place < len(predicted) and predicted[self._place] == output[at]:
                self.count, self._place, self._matched = self.count + 1, self._place + 1, at + 1
                continue
            self._lost = True
            if at + 1 < NGRAM:
                continue
            start = self._prediction.after(self._place, output[at + 1 - NGRAM : at + 1])
            if start is not None:
                self.count += min(NGRAM, at + 1 - self._matched)
                self._place = start + NGRAM
                self._matched = at + 1
                self._lost = False
        self._read = len(output)
