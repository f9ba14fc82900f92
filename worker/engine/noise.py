"""Randomness without state: a number for each (seed, choice, position, token), the same in every batch and epoch.

The generator is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014): a counter that
walks by an odd constant, and a finaliser that spreads every bit over all others.
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


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; torch's own copies the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def uniform(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 in (0, 1) for `keys` [rows, 1] and token ids [rows, n] or [n], all int64; products wrap, as they must."""
    value = keys + (tokens + 1) * _signed(_STEP)
    value = (value ^ _shift(value, 30)) * _signed(_FIRST)
    value = (value ^ _shift(value, 27)) * _signed(_SECOND)
    value = value ^ _shift(value, 31)
    # The upper 53 bits, at the middle of their interval: neither 0 nor 1, so that both logarithms below are finite.
    return (_shift(value, 11).to(torch.float64) + 0.5) * 2.0**-53


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise; the argmax of logits + noise is distributed as softmax(logits)."""
    return -torch.log(-torch.log(uniform(keys, tokens)))
