"""The token sequences that a request forbids, indexed so that a step looks at few of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from worker.scheduling.sequence import Sequence as Generation

_KEPT = 256
"""Requests whose index is kept. One that is dropped is built again."""


class BadWords:
    """The forbidden sequences of one request, as a trie of the tokens before each last one, read backwards."""

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self._next: dict[tuple[int, int], int] = {}
        """Node and token → node. The root, 0, is no node's child."""
        self._last: dict[int, list[int]] = {}
        """Node → the last tokens of the sequences whose beginning it is."""
        for tokens in sequences:
            node = 0
            for token in reversed(tokens[:-1]):
                node = self._next.setdefault((node, token), len(self._next) + 1)
            self._last.setdefault(node, []).append(tokens[-1])

    def forbidden(self, output: Sequence[int], guessed: Sequence[int] = ()) -> list[int]:
        """The tokens with which `output` and `guessed` would end in a forbidden sequence. Reads no more of them than
        matches."""
        found, node = list(self._last.get(0, ())), 0
        for token in chain(reversed(guessed), reversed(output)):
            following = self._next.get((node, token))
            if following is None:
                break
            node = following
            found += self._last.get(node, ())
        return found


class BadWordsIndex:
    """The forbidden sequences of the requests that run, by request id."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, BadWords] = OrderedDict()

    def forbidden(self, rows: Iterable[Generation]) -> dict[int, list[int]]:
        """By index into `rows`, the tokens that are forbidden next, of those that forbid any."""
        bound = [(index, row) for index, row in enumerate(rows) if row.sampling.bad_words]
        found = {index: self._words(row).forbidden(row.output, row.guessed) for index, row in bound}
        return {index: tokens for index, tokens in found.items() if tokens}

    def _words(self, row: Generation) -> BadWords:
        words = self._known.get(row.rid)
        if words is None:
            words = self._known[row.rid] = BadWords(row.sampling.bad_words)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(row.rid)
        return words
