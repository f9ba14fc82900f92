"""How much of the waiting prompts is computed in a step that others decode in.

A long chunk is computed at the best rate and makes every stream, and every cancel, wait for its end. So beside rows
that decode a chunk is as long as this process has found that a step of BESIDE_S allows, and never shorter than
LEAST_TOKENS, from where on the rate is nearly that of long chunks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

BESIDE_S = 0.03
LEAST_TOKENS = 64


@dataclass(slots=True)
class Pace:
    """Learns from the steps of one epoch."""

    _per_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=7))

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """Record a finished step. Where it fed few prompt tokens, its time says nothing about them."""
        if prompt_tokens >= LEAST_TOKENS:
            self._per_token_s.append(seconds / prompt_tokens)

    @property
    def beside(self) -> int:
        """The most prompt tokens of a step that others decode in."""
        if not self._per_token_s:
            return LEAST_TOKENS
        return max(LEAST_TOKENS, int(BESIDE_S / median(self._per_token_s)))
