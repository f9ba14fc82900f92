"""Guesses of the next tokens, looked up in a sequence's own context and in its request's prediction.

Where the last tokens of a context have occurred in it before, the tokens that came after them are guessed to come
again. A step feeds the guesses behind the last token and samples after each of them. Those that equal what was sampled
before them are kept, so the output is the same with guesses and without. A wrong guess costs part of a step; therefore
guesses grow longer while they are right, and rest while they are wrong.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterable
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # a sequence has its lookup
    from worker.scheduling.kv_cache import KVAccount
    from worker.scheduling.sequence import Sequence

# A request's predicted content: where its n-grams are, and how much of it an answer has.


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

    def __init__(self, prompt: abc.Sequence[int], predicted: abc.Sequence[int]) -> None:
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

    def starts(self, gram: abc.Sequence[int]) -> Places:
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

    def _scan(self, gram: abc.Sequence[int]) -> Places:
        begins = self.tokens[: 1 - NGRAM] == gram[0]
        for offset in range(1, NGRAM):
            begins &= self.tokens[offset : offset + len(begins)] == gram[offset]
        return np.flatnonzero(begins)

    def after(self, place: int, gram: abc.Sequence[int]) -> int | None:
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
