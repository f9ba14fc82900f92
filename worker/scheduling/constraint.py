"""One choice's grammar while the choice grows: which tokens may come next, and whether the text is complete."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from control.messages import Sampling
from control.text.grammar import error_of

Bits = NDArray[np.uint8]
"""One bit per token, the lowest of each byte first."""


class Constraint:
    """The state of a grammar after a choice's output.

    If the grammar is complete the choice ends, below `min_tokens` too. If it may end or continue, the stop ids are
    allowed once there are `min_tokens`.
    """

    def __init__(self, compiled: LLMatcher | str, eos_ids: Sequence[int], vocab_size: int, sampling: Sampling) -> None:
        self._matcher = compiled.deep_copy() if isinstance(compiled, LLMatcher) else None
        self._failure = "" if isinstance(compiled, LLMatcher) else compiled
        self._stop_ids = sampling.stop_ids
        self._min_tokens = sampling.min_tokens
        self._unwanted = [token for token in eos_ids if token not in sampling.stop_ids]
        self._count = 0
        self.vocab_size = vocab_size
        """Number of bits of a mask."""

    @property
    def failure(self) -> str:
        """The reason why no token can follow; empty if one can."""
        if self._failure or self._matcher is None:
            return self._failure
        return error_of(self._matcher) if self._matcher.is_error() else ""

    @property
    def complete(self) -> bool:
        """True if the text is all that the grammar lets it be."""
        return self._matcher is not None and self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def matcher(self) -> LLMatcher:
        """Only where there is no failure."""
        assert self._matcher is not None
        return self._matcher

    def advance(self, token: int) -> None:
        """Take the choice's next token; one that the grammar does not allow is a failure."""
        self._count += 1
        if self._matcher is not None and not self.complete:
            self._matcher.consume_token(token)

    def followed_by(self, token: int) -> Constraint:
        """The constraint as it would be after one more token."""
        following = copy(self)
        following._matcher = None if self._matcher is None else self._matcher.deep_copy()
        following.advance(token)
        return following

    def guesses(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that must come, where the grammar leaves one way; else those of `tokens` that it allows."""
        if self.failure or self.complete:
            return []
        forced = self.matcher.compute_ff_tokens()
        return forced or list(tokens[: self.matcher.validate_tokens(list(tokens))])

    def replay(self, output: Sequence[int]) -> None:
        """Take what the choice has put out, in this epoch or another."""
        for token in output:
            self.advance(token)

    def finish(self, bits: Bits) -> None:
        """Correct the library's `bits` in place: the request defines its stop ids and `min_tokens`. If these leave no
        token, the grammar's bits stay."""
        before = bits.copy()
        must_go_on = self._count < self._min_tokens
        if self.matcher.is_accepting() and not must_go_on:
            for token in self._stop_ids:
                bits[token >> 3] |= 1 << (token & 7)
        for token in [*self._unwanted, *(self._stop_ids if must_go_on else ())]:
            bits[token >> 3] &= 0xFF ^ (1 << (token & 7))
        if not bits.any():
            bits[:] = before
        if not bits.any():
            self._failure = "no token of this model's vocabulary goes on with it"
