"""DRY ("don't repeat yourself"): less for tokens that would go on with a sequence that the context has already.

A token that followed the longest earlier occurrence of the context's end, of `length` tokens, loses
`multiplier * base ** (length - allowed_length)`, where `length` is at least `allowed_length`. Sequences end at
breakers, such as line ends. As in llama.cpp (common/sampling.cpp, llama_sampler_dry), after p-e-w's proposal for
text-generation-webui. What is taken follows from the context alone, so that an adoption repeats it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from control.messages import Sampling
from control.text.text_stream import Decode
from worker.scheduling.sequence import Sequence

_LARGEST = 1e30
"""No logit is so large; what is taken must stay a number in float32."""
_KEPT = 256
"""Requests whose prompts are kept as arrays. One that is dropped is made again."""
_TEXTS = 65_536
"""Tokens whose text is kept."""
_LONGEST = 256
"""Tokens beyond the allowed ones that are compared at most, where the base is near 1."""
_BASE = 0x9E3779B97F4A7C15
"""Of the hash; odd."""


class Repetitions:
    """The reductions of the requests that run. `decode` gives the texts in which breakers are looked for."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._prompts: OrderedDict[tuple[str, int], NDArray[np.int64]] = OrderedDict()
        """By request and choice."""
        self._texts: dict[int, str] = {}

    def reductions(self, rows: Iterable[Sequence]) -> dict[int, dict[int, float]]:
        """By index into `rows`, what each token's logit loses, of those rows that ask for it."""
        bound = [(index, row) for index, row in enumerate(rows) if row.sampling.dry_multiplier > 0]
        reductions = {
            index: reductions_of(self._context(row), self._unbroken(row), row.sampling) for index, row in bound
        }
        return {index: reduction for index, reduction in reductions.items() if reduction}

    def _context(self, row: Sequence) -> NDArray[np.int64]:
        key = (row.rid, row.choice)
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = np.array(row.prompt, np.int64)
            if len(self._prompts) > _KEPT:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(key)
        context = np.concatenate([prompt, np.array([*row.output, *row.guessed], np.int64)])
        last = row.sampling.dry_penalty_last_n
        return context if last < 0 else context[len(context) - min(last, len(context)) :]

    def _unbroken(self, row: Sequence) -> int:
        """The number of tokens at the context's end without a breaker: no sequence is longer."""
        breakers = row.sampling.dry_sequence_breakers
        tokens = len(row.prompt) + len(row.output) + len(row.guessed)
        if not breakers or self._decode is None:
            return tokens
        longest = max(len(breaker) for breaker in breakers)
        following = ""  # the text after a token, as far as a breaker that begins in it may reach
        starts: list[int] = []  # of the tokens after it, the last one first, counted from the text's end
        end = 0
        for token in _backwards(row):
            text = self._text(token)
            window = text + following
            for breaker in breakers:
                place = window.rfind(breaker, 0, len(text) + len(breaker) - 1)
                if place >= 0:
                    # Characters from the breaker's end to the text's.
                    tail_length = end - (place + len(breaker) - len(text))
                    return sum(1 for start in starts if start <= tail_length)
            end += len(text)
            starts.append(end)
            following = window[: longest - 1]
            if len(starts) >= _longest(row.sampling):
                break
        return len(starts)

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            assert self._decode is not None
            if len(self._texts) >= _TEXTS:
                self._texts.clear()
            text = self._texts[token] = self._decode([token])
        return text


def _backwards(row: Sequence) -> Iterable[int]:
    """The tokens of the context, the last one first."""
    yield from reversed(row.guessed)
    yield from reversed(row.output)
    yield from reversed(row.prompt)


def _longest(sampling: Sampling) -> int:
    """The length from which on a repetition loses no more, or so much that more makes no difference."""
    if sampling.dry_base <= 1:
        return sampling.dry_allowed_length
    most = math.log(_LARGEST / sampling.dry_multiplier) / math.log(sampling.dry_base)
    return sampling.dry_allowed_length + min(_LONGEST, max(0, math.ceil(most)))


def reductions_of(context: NDArray[np.int64], unbroken: int, sampling: Sampling) -> dict[int, float]:
    """The reduction of each token that followed an earlier occurrence of the context's end; an occurrence has at most
    `unbroken` tokens. The time is that of a few passes over the context, whatever repeats in it: occurrences are
    compared by hashes, and their lengths are found by halving."""
    allowed = sampling.dry_allowed_length
    size = len(context)
    most = min(unbroken, _longest(sampling), size - 1)
    if most < allowed:
        return {}
    ends = np.flatnonzero(context[:-1] == context[-1])  # of earlier occurrences of the last token
    if not len(ends):
        return {}
    powers = np.cumprod(np.full(size, _BASE, np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((context + 1).astype(np.uint64) * powers)])
    lifts = powers[size - 2 - ends]  # by what the sum up to an end is multiplied to stand where the context's does
    least = np.ones(len(ends), np.int64)
    greatest = np.minimum(most, ends + 1)
    while (least < greatest).any():
        middle = (least + greatest + 1) // 2
        equal = (sums[ends + 1] - sums[ends + 1 - middle]) * lifts == sums[size] - sums[size - middle]
        least = np.where(equal, middle, least)
        greatest = np.where(equal, greatest, middle - 1)
    order = np.argsort(least, kind="stable")
    longest = dict(
        zip(context[ends + 1][order].tolist(), least[order].tolist(), strict=True)
    )  # the last one of a token
    return {token: _penalty(length, sampling) for token, length in longest.items() if length >= allowed}


def _penalty(length: int, sampling: Sampling) -> float:
    exponent = length - sampling.dry_allowed_length
    if exponent * math.log(sampling.dry_base) > math.log(_LARGEST / sampling.dry_multiplier):
        return _LARGEST
    return sampling.dry_multiplier * sampling.dry_base**exponent
