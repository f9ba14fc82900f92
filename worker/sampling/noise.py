"""Randomness without state: a number for each (seed, choice, position, token), the same in every batch and epoch.

The generator is splitmix64: a counter with an odd constant, and a finaliser. (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, 2014.) Its numbers for tokens are made where the logits are: in C++ (sample.h), or by
torch (torch/sampler.py).
"""

from __future__ import annotations

MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


def uniform(key: int) -> float:
    """A number from 0 to 1 of a row's own; none of its tokens has it."""
    return (_mix(key) >> 11) * 2.0**-53


def row_key(seed: int, choice: int, position: int) -> int:
    """A 64-bit key of one token's place: `choice` of the request with `seed`, at `position`."""
    key = seed & MASK
    for part in (choice, position):
        key = _mix((key + STEP) & MASK) ^ part
    return _mix((key + STEP) & MASK)
