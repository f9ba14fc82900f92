"""Randomness without state: a number for each (seed, choice, position, token), the same in every batch and epoch.

The generator is splitmix64: a counter with an odd constant, and a finaliser. (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, 2014.)
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def row_key(seed: int, choice: int, position: int) -> int:
    """A 64-bit key, as a signed integer, of one token's place: `choice` of the request with `seed`, at `position`."""
    key = seed & _MASK
    for part in (choice, position):
        key = _mix((key + _STEP) & _MASK) ^ part
    return _signed(_mix((key + _STEP) & _MASK))


def _fold(value: torch.Tensor, bits: int) -> torch.Tensor:
    """`value ^ (value >> bits)` in place, with the logical shift that torch lacks: its own copies the sign."""
    value ^= (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
    return value


def noise_bits(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """52 random bits, for `keys` [rows, 1] and token ids [rows, n] or [n], all int64: products wrap, as they must."""
    value = keys + (tokens + 1).mul_(_signed(_STEP))
    value = _fold(value, 30).mul_(_signed(_FIRST))
    value = _fold(value, 27).mul_(_signed(_SECOND))
    return (_fold(value, 31) >> 12).bitwise_and_((1 << 52) - 1)


def gumbel(bits: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Gumbel noise of `noise_bits`; the argmax of logits + noise is distributed as softmax(logits). The large values,
    which decide, come from small numbers, so float32 is exact to 1e-5 there at a quarter of the time. Its smallest
    value may be -inf, which is never drawn."""
    # The middle of each of 2**52 intervals of (0, 1): exact in float64, and neither 0 nor 1.
    uniform = bits.to(dtype).add_(0.5).mul_(2.0**-52)
    return uniform.neg_().log1p_().neg_().log_().neg_()
