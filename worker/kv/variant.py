"""The variant of a layer's attention: its differences from plain scaled dot products."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Variant:
    """`window` counts the positions that a token sees, itself included (None: all before it). `softcap` bounds scores
    by `softcap · tanh(score / softcap)`. `sinks` (heads,) are learned scores that take weight but give no value. `ends`
    (tokens,) of a step are the positions before which each token sees its sequence (None: its own included)."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    ends: Tensor | None = None

    @property
    def plain(self) -> bool:
        """True where torch's fused kernel can do it."""
        return self.softcap is None and self.sinks is None
