"""Limits the next tokens of a step's rows: grammars allow, bad words forbid, and reasoning budgets force tokens."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
import structlog
from llguidance import LLExecutor
from numpy.typing import NDArray

from control.messages import ReasoningBudget
from control.text.text_stream import Decode
from worker.sampling.dry import Repetitions
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()

_THREADS = 8
"""Most threads that compute masks; a row takes some 25 µs."""
_TOGETHER = 16
"""Rows from which on it pays to wake threads. On a host of few processors it never does: they have other work."""


_KEPT = 256
"""Requests whose index of bad words is kept. One that is dropped is built again."""
_BEFORE_OPENING = 8
"""Most white-space tokens before the opening mark of a reasoning."""


@dataclass(frozen=True, slots=True)
class TokenConstraints:
    """Constraints on the next tokens of a step's rows, by index; empty in most steps."""

    allowed: dict[int, NDArray[np.uint8]] = field(default_factory=dict[int, NDArray[np.uint8]])
    """Tokens that grammars allow."""
    forbidden: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """Tokens that bad words forbid."""
    forced: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens that reasoning budgets force."""
    reductions: dict[int, dict[int, float]] = field(default_factory=dict[int, dict[int, float]])
    """The numbers that DRY subtracts from the logits of tokens."""
    impossible: frozenset[int] = frozenset()
    """Rows of which no token is allowed."""


class Constraints:
    """The constraints of the requests that run. `decode` finds the marks of a reasoning that are no tokens of their
    own."""

    def __init__(self, decode: Decode | None = None) -> None:
        self._decode = decode
        self._masks = Masks()
        self._bad_words = BadWordsIndex()
        self._repetitions = Repetitions(decode)

    def of(self, rows: list[Sequence]) -> tuple[TokenConstraints, set[int]]:
        """The constraints of the rows, and the indices of the rows whose constraints raise an exception."""
        try:
            return self._of(rows), set()
        except Exception as error:
            log.warning("constraints failed in a step", error=repr(error), action="sample")
        constraints = TokenConstraints()
        failed: set[int] = set()
        impossible: set[int] = set()
        for index, row in enumerate(rows):
            try:
                alone = self._of([row])
            except Exception:
                log.exception("could not constrain a row", rid=row.rid, choice=row.choice, action="sample")
                failed.add(index)
                continue
            if 0 in alone.allowed:
                constraints.allowed[index] = alone.allowed[0]
            if 0 in alone.forbidden:
                constraints.forbidden[index] = alone.forbidden[0]
            if 0 in alone.forced:
                constraints.forced[index] = alone.forced[0]
            if 0 in alone.reductions:
                constraints.reductions[index] = alone.reductions[0]
            if alone.impossible:
                impossible.add(index)
        return replace(constraints, impossible=frozenset(impossible)), failed

    def _of(self, rows: list[Sequence]) -> TokenConstraints:
        allowed = self._masks.fill(rows)
        impossible = frozenset(_keep_listed(rows, allowed))
        forced = forced_tokens(rows, self._decode)
        fitting = {row: token for row, token in forced.items() if row not in allowed or _allows(allowed[row], token)}
        return TokenConstraints(
            allowed, self._bad_words.forbidden(rows), fitting, self._repetitions.reductions(rows), impossible
        )


def _allows(bits: NDArray[np.uint8], token: int) -> bool:
    place = token >> 3
    return place < len(bits) and bool(bits[place] >> (token & 7) & 1)


def _keep_listed(rows: list[Sequence], allowed: dict[int, NDArray[np.uint8]]) -> list[int]:
    """Leave the rows with `allowed_token_ids` only these in `allowed`; the rows that have no token left then. The end
    may not come before `min_tokens`: a row with a mask is asked for nothing else."""
    impossible: list[int] = []
    for index, row in enumerate(rows):
        sampling = row.sampling
        if not sampling.allowed_token_ids or (row.constraint is not None and index not in allowed):
            continue
        listed: set[int] = set(sampling.allowed_token_ids)
        if index not in allowed and row.position < sampling.min_tokens:
            listed -= set(sampling.stop_ids)
        width = len(allowed[index]) if index in allowed else max(sampling.allowed_token_ids) // 8 + 1
        places = np.array([token for token in listed if token < 8 * width], np.int64)
        bits = np.zeros(width, np.uint8)
        np.bitwise_or.at(bits, places >> 3, (1 << (places & 7)).astype(np.uint8))
        if index in allowed:
            bits &= allowed[index]
        if not bits.any():
            impossible.append(index)
            allowed.pop(index, None)
            continue
        allowed[index] = bits
    return impossible


class Masks:
    """The tokens that grammars allow, for all constrained rows of a step in one call of the library."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(_THREADS, len(os.sched_getaffinity(0)) // 2)
        self._executor: LLExecutor | None = None

    def fill(self, rows: list[Sequence]) -> dict[int, NDArray[np.uint8]]:
        """By index, the bits [ceil(vocabulary / 8)] uint8 of each row that has a grammar, lowest of a byte first. A row
        whose constraint has failed, perhaps only here, is left out: it must not be sampled."""
        bound = [(place, row.constraint) for place, row in enumerate(rows) if row.constraint is not None]
        working = [(place, constraint) for place, constraint in bound if not constraint.failure]
        if not working:
            return {}
        width = 4 * -(-working[0][1].vocab_size // 32)
        bits = np.zeros((len(working), width), dtype=np.uint8)
        if self._threads < 2 or len(working) < _TOGETHER:
            for index, (_, constraint) in enumerate(working):
                constraint.matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, width)
        else:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            matchers = [(constraint.matcher, index) for index, (_, constraint) in enumerate(working)]
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, width, len(working))
        for index, (_, constraint) in enumerate(working):
            if not constraint.failure:
                constraint.finish(bits[index])
        return {place: bits[index] for index, (place, constraint) in enumerate(working) if not constraint.failure}


class BadWords:
    """The forbidden sequences of one request, as a trie of the tokens before each last one, read backwards."""

    def __init__(self, sequences: Tokens[Tokens[int]]) -> None:
        self._next: dict[tuple[int, int], int] = {}
        """Node and token → node. The root, 0, is no node's child."""
        self._last: dict[int, list[int]] = {}
        """Node → the last tokens of the sequences whose beginning it is."""
        for tokens in sequences:
            node = 0
            for token in reversed(tokens[:-1]):
                node = self._next.setdefault((node, token), len(self._next) + 1)
            self._last.setdefault(node, []).append(tokens[-1])

    def forbidden(self, output: Tokens[int], guessed: Tokens[int] = ()) -> list[int]:
        """The tokens with which `output` and `guessed` would end in a forbidden sequence. Reads no more of them than
        matches."""
        forbidden = list(self._last.get(0, ()))
        node = 0
        for token in chain(reversed(guessed), reversed(output)):
            following = self._next.get((node, token))
            if following is None:
                break
            node = following
            forbidden += self._last.get(node, ())
        return forbidden


class BadWordsIndex:
    """The forbidden sequences of the requests that run, by request id."""

    def __init__(self) -> None:
        self._by_rid: OrderedDict[str, BadWords] = OrderedDict()

    def forbidden(self, rows: Iterable[Sequence]) -> dict[int, list[int]]:
        """By index into `rows`, the tokens that are forbidden next, of those that forbid any."""
        bound = [(index, row) for index, row in enumerate(rows) if row.sampling.bad_words]
        forbidden = {index: self._words(row).forbidden(row.output, row.guessed) for index, row in bound}
        return {index: tokens for index, tokens in forbidden.items() if tokens}

    def _words(self, row: Sequence) -> BadWords:
        words = self._by_rid.get(row.rid)
        if words is None:
            words = self._by_rid[row.rid] = BadWords(row.sampling.bad_words)
            if len(self._by_rid) > _KEPT:
                self._by_rid.popitem(last=False)
        self._by_rid.move_to_end(row.rid)
        return words


def forced_tokens(rows: Iterable[Sequence], decode: Decode | None) -> dict[int, int]:
    """By index into `rows`, the token of the closing mark that must come next, of those whose budget is used up. It
    follows from the output alone, so that an adoption repeats it."""
    forced = {
        index: closing_token(budget, [*row.output, *row.guessed], decode)
        for index, row in enumerate(rows)
        if (budget := row.sampling.reasoning) is not None and _may_close(budget, row.position)
    }
    return {index: token for index, token in forced.items() if token is not None}


def closing_token(budget: ReasoningBudget, output: list[int], decode: Decode | None) -> int | None:
    """The token of the closing mark that must follow `output`; None where any may."""
    if not _may_close(budget, len(output)):
        return None
    start = 0 if budget.begun else _opened(budget, output, decode)
    if start is None:
        return None
    index = len(output) - start - budget.tokens
    if not 0 <= index < len(budget.closing):
        return None
    return None if _has(budget.close, budget.closing, output, decode) else budget.closing[index]


def _may_close(budget: ReasoningBudget, count: int) -> bool:
    """True if a part of the closing mark can be due after `count` tokens: only at the end of the budget is the output
    read."""
    marks = max(len(budget.opening), len(budget.closing))
    return budget.tokens <= count <= budget.tokens + _BEFORE_OPENING + 2 * marks


def _opened(budget: ReasoningBudget, output: list[int], decode: Decode | None) -> int | None:
    """The number of tokens up to the end of the opening mark; None where the answer has not begun with it."""
    head = output[: _BEFORE_OPENING + len(budget.opening)]
    if len(budget.opening) == 1:
        return head.index(budget.opening[0]) + 1 if budget.opening[0] in head else None
    # Text without control tokens would lack those of a mark of several, such as harmony's.
    if (place := _place(budget.opening, head)) is not None:
        return place + len(budget.opening)
    if decode is None or not decode(head).lstrip().startswith(budget.open):
        return None
    return next(count for count in range(1, len(head) + 1) if budget.open in decode(head[:count]))


def _has(mark: str, tokens: list[int], output: list[int], decode: Decode | None) -> bool:
    """True if `output` has the mark, as its token or, where it is none of its own, in the text."""
    if len(tokens) == 1:
        return tokens[0] in output
    return _place(tokens, output) is not None or (decode is not None and mark in decode(output))


def _place(tokens: list[int], output: list[int]) -> int | None:
    """The index at which these tokens stand in a row in the output."""
    size = len(tokens)
    return next((at for at in range(len(output) - size + 1) if output[at : at + size] == tokens), None)
