"""Kinds of packed weights that the C++ library multiplies, in the order of their numbers there (layer.h); no torch."""

from __future__ import annotations

from collections.abc import Iterable

PLAIN = ("float32", "bfloat16", "float16", "int8")
BLOCKS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4")
GROUPED = ("e4m3", "int4", "e2m1")
KINDS = (*PLAIN, *BLOCKS, *GROUPED)
NUMBERS = {name: number for number, name in enumerate(KINDS)}


def bits_of(kinds: Iterable[str]) -> int:
    """The set of `kinds` as bits by number, with float32, which the library's own check needs."""
    bits = 1
    for kind in kinds:
        bits |= 1 << NUMBERS[kind]
    return bits


ALL = bits_of(KINDS)
