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


_CURVED = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The values of the codes of IQ4_NL and IQ4_XS."""


def _iq4_nl(data: Bytes) -> Floats:
    return _half(data[:, :2]) * _CURVED[_nibbles(data[:, 2:], 16)]


def _iq4_xs(data: Bytes) -> Floats:
    """A half, two upper bits of eight scales, their lower four, 128 bytes of weights."""
    upper = np.ascontiguousarray(data[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = (_fields(data[:, 4:8], 1, (0, 4), 15) | (upper & 3).astype(np.uint8) << 4).astype(np.float32) - 32
    whole = _CURVED[_nibbles(data[:, 8:], 16)].reshape(-1, 8, 32)
    return ((_half(data[:, :2]) * scales)[:, :, None] * whole).reshape(len(data), -1)


_GRID = (
    "000010002000500070000100110021004100610002001200520033000400240054007400150035000600260017004700"
    "770000101010201040100110111051100210321072101310531044101610561027100020102050207020012031206120"
    "122052200320432024205420742015203520072037203030113051300230223013303330633044300530253076301730"
    "573000403140714012404240234004403440154007402050405002502250625033501450545074506650375060601160"
    "316013602560176000702070407002702270627033700570457000011001200140010101110131015101710102012201"
    "130143016301450165011601270100111011301160110111411112110311331114110511251107116711002121215121"
    "712102214221232104213421552106212721103140317031013131311231723103314331143126310731304150412141"
    "414113413341244164410541454110510151315112510351235115510261426172614461646110713071017121711271"
    "537114712671077100021002300250027002010221024102610212023202720203022302140234025402050225027602"
    "070237025702001220120112311271122212521213124312241215121022402270221222322203227322142235227522"
    "172247220032203250321132223242321332333224320532663210427042024232422342534214422742574240521152"
    "225273520452355207520062206270621262556216625072117262720372347205722003110331035103710322031303"
    "330353032403440374031503360317031013301350134113121332130413061327136713002321230223232343230523"
    "103301334133123332337233033314333433743355333733304311436143224313432543064346431053015321535253"
    "235344536553375361631463107330730273227353730004400421040204420472042304140405040704201470141114"
    "311422140314531434141514551410243024012451241224332404247524262407244034113431340234223413345334"
    "004420444244734404441744505470541254265431644364066401745174037434741574200501054105220504054405"
    "740525056605470510153015501521151215231527150025112532250325632535252035703501357235443515355635"
    "373510454045024523456445215562551555355524652075407522751106310651061306330606060016021672164616"
    "212643262426552626260726003641361236043652463446264600563056435606565066046611763176000740077007"
    "020722076307040745072607201711174217341754171027402701276127122703271527203723375337353710475047"
    "31470247054722572457206713670077"
)
"""The grid of IQ3_S: by index four digits m of the magnitudes 2 · m + 1. They are those of `iq3s_grid` in
github.com/ggml-org/ggml, src/ggml-common.h (MIT licence, Copyright (c) 2023-2026 The ggml authors)."""
_IQ3_S = 2 * np.array([int(digit) for digit in _GRID], np.float32).reshape(512, 4) + 1


def _iq3_s(data: Bytes) -> Floats:
    """A half, 64 low bytes of indices, 8 of their upper bits, 32 of signs, eight scales of four bits."""
    scales = 1 + 2 * _fields(data[:, 106:110], 1, (0, 4), 15).astype(np.float32)
    bits = tuple(range(8))
    indices = data[:, 2:66].astype(np.uint16) | _fields(data[:, 66:74], 1, bits, 1).astype(np.uint16) << 8
    signs = 1 - 2 * _fields(data[:, 74:106], 1, bits, 1).astype(np.float32)
    whole = _IQ3_S[indices].reshape(-1, 8, 32)
    return (((_half(data[:, :2]) * scales)[:, :, None] * whole) * signs.reshape(-1, 8, 32)).reshape(len(data), -1)


def _tq2_0(data: Bytes) -> Floats:
    """64 bytes of weights, a half."""
    return (_fields(data[:, :64], 32, (0, 2, 4, 6), 3).astype(np.float32) - 1) * _half(data[:, 64:66])


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
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "iq3_s": _iq3_s,
    "tq2_0": _tq2_0,
}
