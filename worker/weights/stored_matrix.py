"""A quantized matrix as a checkpoint stores it, of whatever format: GGUF blocks, FP8, W8A8, AWQ, GPTQ or MXFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import float8_e4m3fn
from numpy.typing import DTypeLike, NDArray

from worker.weights.formats import FORMATS, BlockFormat
from worker.weights.schemes import E2M1, E4M3, INT4, INT8

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of 4 bits by their code (OCP Microscaling Formats 1.0)."""
EXPONENT_ZERO = 127
"""The code of the scale 1 among powers of two (E8M0)."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix (outputs, inputs). `kind` is its name in native/library.py, `codes` is uint8 of shape (outputs, bytes
    of a row), which may be a view of the mapped file.

    A format of blocks has its scales among the codes; `scales` and `zeros` are None and `group` is 0. All others are
    codes with a scale by group of inputs: w[o, i] = scales[o, i // group] · (code[o, i] - zeros[o, i // group]). Codes
    are e4m3 numbers of 8 bits (OCP FP8: no infinity), int8 whole numbers, or of 4 bits, the first of two in the low
    half of a byte: int4, unsigned whole numbers, or e2m1 floats. `scales` is (outputs, groups) in float32, for e2m1
    exponents of two plus 127 in uint8 (E8M0). `zeros` is the same in uint8, or None for zero. The last group may be
    short. A product with an int8 matrix rounds the other factor to 8 bits too.
    """

    kind: str
    codes: NDArray[np.uint8]
    scales: NDArray[Any] | None = None
    zeros: NDArray[np.uint8] | None = None
    group: int = 0

    @property
    def in_blocks(self) -> bool:
        return self.scales is None

    @property
    def format(self) -> BlockFormat:
        """The format of the blocks. Raises KeyError for codes with a scale by group."""
        return FORMATS[self.kind]

    @property
    def shape(self) -> tuple[int, int]:
        outputs, row_bytes = self.codes.shape
        if self.in_blocks:
            return outputs, row_bytes // self.format.bytes * self.format.weights
        return outputs, row_bytes * (2 if self.kind in (INT4, E2M1) else 1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None)

    def rows(self, start: int, stop: int) -> StoredMatrix:
        """The outputs [start, stop), views."""
        scales = None if self.scales is None else self.scales[start:stop]
        zeros = None if self.zeros is None else self.zeros[start:stop]
        return StoredMatrix(self.kind, self.codes[start:stop], scales, zeros, self.group)

    def columns(self, start: int, stop: int) -> StoredMatrix:
        """The inputs [start, stop) of a matrix in blocks, a view. Raises ValueError where a border is inside one."""
        size = self.format.weights
        if start % size or stop % size:
            raise ValueError(f"inputs {start} to {stop} cut a block of {size} weights ({self.kind})")
        first, last = (place // size * self.format.bytes for place in (start, stop))
        return StoredMatrix(self.kind, self.codes[:, first:last])

    def padded(self, outputs: int) -> StoredMatrix:
        """The matrix with blocks of zeros below, up to `outputs` rows: itself where it has as many."""
        missing = outputs - self.codes.shape[0]
        if not missing:
            return self
        return StoredMatrix(self.kind, np.concatenate([self.codes, np.zeros((missing, self.codes.shape[1]), np.uint8)]))

    def values(self) -> NDArray[np.float32]:
        """The codes less their zeros (outputs, inputs), in float32, where each is exact; of a matrix with a scale by
        group."""
        outputs, inputs = self.shape
        if self.kind == E4M3:
            return self.codes.view(float8_e4m3fn).astype(np.float32)
        if self.kind == INT8:
            return self.codes.view(np.int8).astype(np.float32)
        halves = np.stack([self.codes & 15, self.codes >> 4], axis=-1).reshape(outputs, inputs)
        if self.kind == E2M1:
            return np.array(E2M1_VALUES, np.float32)[halves]
        values = halves.astype(np.float32)
        return values if self.zeros is None else values - self._by_input(self.zeros.astype(np.float32))

    def dequantized(self, dtype: DTypeLike) -> NDArray[Any]:
        """The weights (outputs, inputs) of a matrix with a scale by group; dequantize.py has those of blocks."""
        scales = self.scales
        assert scales is not None
        if self.kind == E2M1:
            scales = np.ldexp(1.0, scales.astype(np.int32) - EXPONENT_ZERO)
        return self.values().astype(dtype) * self._by_input(scales.astype(dtype))

    def _by_input(self, groups: NDArray[Any]) -> NDArray[Any]:
        return np.repeat(groups, self.group, axis=1)[:, : self.shape[1]]


Weights = NDArray[Any] | StoredMatrix
"""A matrix (outputs, inputs) as stored: plain numbers, or quantized ones."""


def joined(parts: list[StoredMatrix]) -> StoredMatrix:
    """Parts of one kind and group, one below the other."""
    first = parts[0]
    scales = (
        None if first.scales is None else np.concatenate([part.scales for part in parts if part.scales is not None])
    )
    zeros = None if first.zeros is None else np.concatenate([part.zeros for part in parts if part.zeros is not None])
    return StoredMatrix(first.kind, np.concatenate([part.codes for part in parts]), scales, zeros, first.group)
