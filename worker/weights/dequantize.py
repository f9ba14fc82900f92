"""Blocks of a file as plain numbers, with the bits of ggml's own functions.

Each function takes blocks (count, bytes of one) as uint8 and gives (count, weights of one) in float32. Sums and
products are in the order of `dequantize_row_q…` in github.com/ggml-org/ggml, src/ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.weights.stored_matrix import StoredMatrix

Bytes = NDArray[Any]
"""Of uint8."""
Floats = NDArray[Any]
"""Of float32."""

CHUNK = 2**22
"""Weights that are computed at a time: the temporaries stay a few times as large as they."""


def dequantize(blocks: StoredMatrix) -> Floats:
    """The matrix (outputs, inputs) in float32."""
    outputs, inputs = blocks.shape
    numbers = np.empty((outputs, inputs), np.float32)
    size = blocks.format.bytes
    convert = FUNCTIONS[blocks.format.name]
    step = max(1, CHUNK // max(1, inputs))
    for start in range(0, outputs, step):
        part = blocks.codes[start : start + step]
        with np.errstate(all="ignore"):  # NaN and infinity of a damaged file stay what they are
            numbers[start : start + step] = convert(part.reshape(-1, size)).reshape(part.shape[0], inputs)
    return numbers


def _half(data: Bytes) -> Floats:
    """(count, 2) bytes → (count, 1) float32."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Low halves of each `run` bytes, then their high ones: (count, bytes) → (count, 2 · bytes)."""
    return _fields(data, run, (0, 4), 15)


def _fields(data: Bytes, run: int, shifts: tuple[int, ...], mask: int) -> Bytes:
    """Of each `run` bytes the bits at the first shift, then those at the next: (count, bytes · shifts)."""
    parts = data.reshape(data.shape[0], -1, 1, run) >> np.array(shifts, np.uint8).reshape(1, 1, -1, 1)
    return (parts & mask).reshape(data.shape[0], -1)


def _q4_0(data: Bytes) -> Floats:
    return _half(data[:, :2]) * (_nibbles(data[:, 2:], 16).astype(np.float32) - 8)


def _q4_1(data: Bytes) -> Floats:
    return _half(data[:, :2]) * _nibbles(data[:, 4:], 16).astype(np.float32) + _half(data[:, 2:4])


def _fifth_bits(data: Bytes) -> Bytes:
    """32 bits, the lowest first, each worth 16: (count, 4) → (count, 32)."""
    return _fields(data, 1, tuple(range(8)), 1) << 4


def _q5_0(data: Bytes) -> Floats:
    whole = _nibbles(data[:, 6:], 16) | _fifth_bits(data[:, 2:6])
    return _half(data[:, :2]) * (whole.astype(np.float32) - 16)


def _q5_1(data: Bytes) -> Floats:
    whole = _nibbles(data[:, 8:], 16) | _fifth_bits(data[:, 4:8])
    return _half(data[:, :2]) * whole.astype(np.float32) + _half(data[:, 2:4])


def _q8_0(data: Bytes) -> Floats:
    return _half(data[:, :2]) * data[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(data: Bytes) -> Floats:
    """16 bytes of scales and minima, 64 of weights, two halves."""
    scale = _half(data[:, 80:82]) * (data[:, :16] & 15).astype(np.float32)
    least = _half(data[:, 82:84]) * (data[:, :16] >> 4).astype(np.float32)
    whole = _fields(data[:, 16:80], 32, (0, 2, 4, 6), 3).reshape(-1, 16, 16).astype(np.float32)
    return (scale[:, :, None] * whole - least[:, :, None]).reshape(len(data), -1)


def _q3_k(data: Bytes) -> Floats:
    """32 bytes of third bits, 64 of lower ones, 12 of scales, a half."""
    lower = _fields(data[:, 96:104], 8, (0, 4), 15)
    upper = _fields(data[:, 104:108], 4, (0, 2, 4, 6), 3)
    scale = _half(data[:, 108:110]) * ((lower | (upper << 4)).astype(np.float32) - 32)
    whole = _fields(data[:, 32:96], 32, (0, 2, 4, 6), 3).astype(np.float32)
    lacking = 1 - _fields(data[:, :32], 32, tuple(range(8)), 1).astype(np.float32)
    return (scale[:, :, None] * (whole - 4 * lacking).reshape(-1, 16, 16)).reshape(len(data), -1)


def _scales_and_minima(data: Bytes) -> tuple[Floats, Floats]:
    """Eight of six bits each, as Q4_K and Q5_K pack them: (count, 12) → two of (count, 8, 1)."""
    scale = data[:, :4]
    least = data[:, 4:8]
    upper = data[:, 8:]
    scales = np.concatenate([scale & 63, (upper & 15) | ((scale >> 2) & 48)], axis=1)
    minima = np.concatenate([least & 63, (upper >> 4) | ((least >> 2) & 48)], axis=1)
    return scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]


def _q4_k(data: Bytes) -> Floats:
    """Two halves, 12 bytes of scales and minima, 128 of weights."""
    scales, minima = _scales_and_minima(data[:, 4:16])
    whole = _nibbles(data[:, 16:], 32).reshape(-1, 8, 32).astype(np.float32)
    return _with_minima(data, scales, minima, whole)


def _q5_k(data: Bytes) -> Floats:
    """Two halves, 12 bytes of scales and minima, 32 of fifth bits, 128 of lower ones."""
    scales, minima = _scales_and_minima(data[:, 4:16])
    upper = _fields(data[:, 16:48], 32, tuple(range(8)), 1) << 4
    whole = (_nibbles(data[:, 48:], 32) | upper).reshape(-1, 8, 32).astype(np.float32)
    return _with_minima(data, scales, minima, whole)


def _with_minima(data: Bytes, scales: Floats, minima: Floats, whole: Floats) -> Floats:
    scale = _half(data[:, :2])[:, :, None]
    least = _half(data[:, 2:4])[:, :, None]
    return ((scale * scales) * whole - least * minima).reshape(len(data), -1)


def _q6_k(data: Bytes) -> Floats:
    """128 bytes of lower bits, 64 of upper ones, 16 scales, a half."""
    scale = _half(data[:, 208:210]) * data[:, 192:208].view(np.int8).astype(np.float32)
    lower = _nibbles(data[:, :128], 64)
    upper = _fields(data[:, 128:192], 32, (0, 2, 4, 6), 3)
    whole = (lower | (upper << 4)).astype(np.float32) - 32
    return (scale[:, :, None] * whole.reshape(-1, 16, 16)).reshape(len(data), -1)


_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of 4-bit floats."""


def _mxfp4(data: Bytes) -> Floats:
    """An exponent of two plus 127, which stands for half of that power here, and 16 bytes of weights."""
    half = np.ldexp(1.0, data[:, :1].astype(np.int32) - 128).astype(np.float32)
    return half * _E2M1[_nibbles(data[:, 1:], 16)]


FUNCTIONS: dict[str, Callable[[Bytes], Floats]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "mxfp4": _mxfp4,
}
