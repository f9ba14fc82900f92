"""How many prompt tokens are computed in one step.

A long chunk is computed at the best rate and makes every stream, every cancel and every claim wait for its end. So a
chunk follows the rate that was measured: a step of prompts alone takes ALONE_S, one in which others decode BESIDE_S.
Chunks beside rows that decode are never shorter than LEAST_TOKENS, from where on the rate is nearly that of long ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

ALONE_S = 1.0
BESIDE_S = 0.03
LEAST_TOKENS = 64
"""Also the first chunk of all, before any rate is known."""
SLOW_TOKENS = 16
"""The shortest chunk of a step of prompts alone, on a machine that computes fewer in ALONE_S."""


def _recent() -> deque[float]:
    return deque(maxlen=7)


@dataclass(slots=True)
class Pace:
    """Learns from the steps of one process, over all its epochs."""

    _beside_s: deque[float] = field(default_factory=_recent)
    """Seconds per prompt token of steps with at least LEAST_TOKENS of them."""
    _alone_s: deque[float] = field(default_factory=_recent)
    """The same of steps without a row that decodes, from SLOW_TOKENS on."""

    def observe(self, seconds: float, prompt_tokens: int, decode_rows: int = 0) -> None:
        """Record a finished step. Where it fed few prompt tokens, its time says nothing about them."""
        if prompt_tokens >= LEAST_TOKENS:
            self._beside_s.append(seconds / prompt_tokens)
        if prompt_tokens >= SLOW_TOKENS and not decode_rows:
            self._alone_s.append(seconds / prompt_tokens)

    @property
    def beside(self) -> int:
        """The most prompt tokens of a step that others decode in."""
        if not self._beside_s:
            return min(LEAST_TOKENS, self.alone)
        return max(min(LEAST_TOKENS, self.alone), int(BESIDE_S / median(self._beside_s)))

    @property
    def alone(self) -> int:
        """The most prompt tokens of a step that nobody decodes in."""
        if not self._alone_s:
            return LEAST_TOKENS
        return max(SLOW_TOKENS, int(ALONE_S / median(self._alone_s)))
