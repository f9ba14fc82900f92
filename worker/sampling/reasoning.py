"""The end of a reasoning whose budget is used up: its closing mark is forced.

The decision follows from the output alone, so that an adoption repeats it.
"""

from __future__ import annotations

from collections.abc import Iterable

from control.messages import ReasoningBudget
from control.text.text import Decode
from worker.scheduling.sequence import Sequence

_BEFORE_OPENING = 8
"""Most white-space tokens before the opening mark."""


def forced_tokens(rows: Iterable[Sequence], decode: Decode | None) -> dict[int, int]:
    """By index into `rows`, the token of the closing mark that must come next, of those whose budget is used up."""
    found = {
        index: closing_token(budget, [*row.output, *row.guessed], decode)
        for index, row in enumerate(rows)
        if (budget := row.sampling.reasoning) is not None and _may_close(budget, row.position)
    }
    return {index: token for index, token in found.items() if token is not None}


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
    before = output[: len(output) - index]
    return None if _has(budget.close, budget.closing, before, decode) else budget.closing[index]


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
    if decode is None or not decode(head).lstrip().startswith(budget.open):
        return None
    return next(count for count in range(1, len(head) + 1) if budget.open in decode(head[:count]))


def _has(mark: str, tokens: list[int], output: list[int], decode: Decode | None) -> bool:
    """True if `output` has the mark, as its token or, where it is none of its own, in the text."""
    if len(tokens) == 1:
        return tokens[0] in output
    return decode is not None and mark in decode(output)
