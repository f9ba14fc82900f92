"""The number of prompt tokens in one step.

Long chunks are computed at the best rate, but streams, cancels and claims wait for their end. So the size follows the
measured rate: a step of prompts alone takes PREFILL_S, one with decode rows MIXED_S. Chunks beside decode rows have at
least LEAST_TOKENS, from which on the rate is nearly the best.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

PREFILL_S = 1.0
MIXED_S = 0.03
LEAST_TOKENS = 64
"""Smallest chunk beside decoding rows, and the first chunk before a rate is known."""
SLOW_TOKENS = 16
"""The shortest chunk of a step of prompts alone, on a machine that computes fewer in PREFILL_S."""


def _recent() -> deque[float]:
    return deque(maxlen=7)


@dataclass(slots=True)
class ChunkSize:
    """Learns from the steps of one process, over all its epochs."""

    _mixed_s: deque[float] = field(default_factory=_recent)
    """Seconds per prompt token of steps with at least LEAST_TOKENS of them."""
    _prefill_s: deque[float] = field(default_factory=_recent)
    """The same of steps without a row that decodes, from SLOW_TOKENS on."""

    def observe(self, seconds: float, prompt_tokens: int, decode_rows: int = 0) -> None:
        """Record a finished step. Where it fed few prompt tokens, its time says nothing about them."""
        if prompt_tokens >= LEAST_TOKENS:
            self._mixed_s.append(seconds / prompt_tokens)
        if prompt_tokens >= SLOW_TOKENS and not decode_rows:
            self._prefill_s.append(seconds / prompt_tokens)

    @property
    def mixed(self) -> int:
        """The most prompt tokens of a step that others decode in."""
        if not self._mixed_s:
            return min(LEAST_TOKENS, self.prefill)
        return max(min(LEAST_TOKENS, self.prefill), int(MIXED_S / median(self._mixed_s)))

    @property
    def prefill(self) -> int:
        """The most prompt tokens of a step that nobody decodes in."""
        if not self._prefill_s:
            return LEAST_TOKENS
        return max(SLOW_TOKENS, int(PREFILL_S / median(self._prefill_s)))
