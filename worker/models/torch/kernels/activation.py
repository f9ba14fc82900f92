"""The gate of a feed-forward layer: activation(gate) · up in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024

SILU = "silu"
GELU_TANH = "gelu_tanh"


# fmt: off
@triton.jit
def _gated(gate, up, out, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """A part (axis 1) of one row (axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < WIDTH
    values = tl.load(gate + row * gate_row + place, mask=mask, other=0.0)
    value = values.to(tl.float32)
    # x · sigmoid(x), or GELU by way of tanh, as x · (1 + tanh(y)) / 2 = x · sigmoid(2 y).
    slope = value
    if GELU:
        slope = 2.0 * 0.7978845608028654 * (value + 0.044715 * value * value * value)
    active = (value / (1.0 + tl.exp(tl.minimum(-slope, 80.0)))).to(values.dtype).to(tl.float32)
    factor = tl.load(up + row * up_row + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + place, active * factor, mask=mask)
# fmt: on


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """gate and up (…, width), dense along width → `activation`(gate) · up, dense; SILU or GELU_TANH."""
    width = gate.shape[-1]
    rows_of_gate, rows_of_up = (
        one.flatten(0, -2) if one.stride(-1) == 1 else one.reshape(-1, width) for one in (gate, up)
    )
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        _gated[(rows_of_gate.shape[0], triton.cdiv(width, BLOCK))](
            rows_of_gate,
            rows_of_up,
            out,
            rows_of_gate.stride(0),
            rows_of_up.stride(0),
            WIDTH=width,
            BLOCK=BLOCK,
            GELU=activation == GELU_TANH,
        )
    return out
