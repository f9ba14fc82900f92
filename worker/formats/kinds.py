"""Kinds of packed weights that the C++ library multiplies, in the order of their numbers there (layer.h); no torch."""

from __future__ import annotations

from collections.abc import Iterable

from worker.formats.blocks import BLOCK_FORMATS, MXFP4

KINDS = ("float32", "bfloat16", "float16", "int8", *BLOCK_FORMATS, MXFP4.name, "e4m3", "int4", "e2m1")
NUMBERS = {name: number for number, name in enumerate(KINDS)}


def bits_of(kinds: Iterable[str]) -> int:
    """The set of `kinds` as bits by number, with float32, which the library's own check needs."""
    bits = 1
    for kind in kinds:
        bits |= 1 << NUMBERS[kind]
    return bits


ALL = bits_of(KINDS)
