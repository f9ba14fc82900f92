"""The noise of noise.py for many tokens at once, by torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from worker.engine.torch.transfer import sent
from worker.sampling.noise import FIRST, SECOND, STEP


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def key_column(keys: Iterable[int], device: torch.device) -> torch.Tensor:
    """Keys of rows, [rows, 1] int64 with the same bits."""
    return sent([_signed(key) for key in keys], torch.int64, device)[:, None]


def _fold(value: torch.Tensor, bits: int) -> torch.Tensor:
    """`value ^ (value >> bits)` in place, with the logical shift that torch lacks: its own copies the sign."""
    value ^= (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
    return value


def noise_bits(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """52 random bits, for `keys` [rows, 1] and token ids [rows, n] or [n], all int64: products wrap, as they must."""
    value = keys + (tokens + 1).mul_(_signed(STEP))
    value = _fold(value, 30).mul_(_signed(FIRST))
    value = _fold(value, 27).mul_(_signed(SECOND))
    return (_fold(value, 31) >> 12).bitwise_and_((1 << 52) - 1)


def gumbel(bits: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gumbel noise of `noise_bits`; the argmax of logits + noise is distributed as softmax(logits). The large values,
    which decide, come from small numbers, so float32 is exact to 1e-5 there at a quarter of the time. Its smallest
    value may be -inf, which is never drawn."""
    # The middle of each of 2**52 intervals of (0, 1): exact in float64, and neither 0 nor 1.
    uniform = bits.to(dtype).add_(0.5).mul_(2.0**-52)
    return uniform.neg_().log1p_().neg_().log_().neg_()
