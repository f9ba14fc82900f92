"""The token sequences that a request forbids, indexed so that a step looks up few of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from worker.scheduling.sequence import Sequence as Generation

_KEPT = 1024
"""Requests whose index is kept. One that is dropped is built again."""


class BadWords:
    """The forbidden sequences of one request."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._after: dict[tuple[int, ...], list[int]] = {}
        for tokens in sequences:
            self._after.setdefault(tuple(tokens[:-1]), []).append(tokens[-1])
        self._always = self._after.pop((), [])
        self._lengths = sorted({len(tokens) for tokens in self._after})

    def forbidden(self, output: Sequence[int]) -> list[int]:
        """The tokens with which `output` would end in a forbidden sequence."""
        tokens = self._always
        for length in self._lengths:
            if length > len(output):
                break
            tokens = tokens + self._after.get(tuple(output[-length:]), [])
        return tokens


class BadWordsIndex:
    """The forbidden sequences of the requests that run, by request id."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, BadWords] = OrderedDict()

    def forbidden(self, rows: Iterable[Generation]) -> dict[int, list[int]]:
        """By sid, the tokens that are forbidden next, of those rows that forbid any."""
        found = {row.sid: self._words(row).forbidden(row.output) for row in rows if row.sampling.bad_words}
        return {sid: tokens for sid, tokens in found.items() if tokens}

    def _words(self, row: Generation) -> BadWords:
        words = self._known.get(row.rid)
        if words is None:
            words = self._known[row.rid] = BadWords(row.sampling.bad_words)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return words
