"""A quantized linear layer, as headers and configuration describe it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuantizedLinear:
    """The stored weight of one linear layer. `group` inputs share a scale, in `rows` outputs; `scale` and `zeros` are
    tensors' names, `zeros` None where there are none."""

    kind: str
    weight: str
    scale: str
    zeros: str | None
    outputs: int
    inputs: int
    group: int
    rows: int = 1
