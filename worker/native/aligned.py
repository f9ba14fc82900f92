"""Memory that begins at the border of a cache line, where numpy promises 16 bytes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE = 64


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array whose values are whatever was there; large ones are not touched."""
    kind = np.dtype(dtype)
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize
    whole = np.empty(size + LINE, np.uint8)
    begin = -whole.ctypes.data % LINE
    return whole[begin : begin + size].view(kind).reshape(shape)
