"""A quantized matrix as a checkpoint stores it, of whatever format: GGUF blocks, FP8, W8A8, AWQ, GPTQ or MXFP4; and the
memory in which the compiled products read it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from numpy.typing import DTypeLike, NDArray

from worker.native.library import BLOCKS, Matrix, Threads
from worker.native.memory import zeros
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
        missing_rows = outputs - self.codes.shape[0]
        if not missing_rows:
            return self
        return StoredMatrix(
            self.kind, np.concatenate([self.codes, np.zeros((missing_rows, self.codes.shape[1]), np.uint8)])
        )

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


CHUNK = 8192
"""Outputs that are packed at once, so that no second copy of the whole is made in another type."""

LARGEST_HALF = np.float32(np.finfo(np.float16).max)

E4M3_UNIT = 256.0
"""The products in C++ read numbers of 8 bits as 2^-8 of their value."""
LEVELS = 127
"""An activation that meets int8 codes has so many levels on each side of zero; the scales of outputs include it."""

Kept = str
"""A kind of packed weights by its name in native/library.py: the type of plain numbers, or a kind of stored matrix."""
PACKED_FROM = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(bfloat16)}
"""The types from which plain numbers are packed; those that are kept as int8 are rounded in C++, from float32."""


BLOCK_BYTES = {name: FORMATS[name].bytes for name in BLOCKS} | {
    "q3_k": 114,
    "q4_k": 148,
    "q5_k": 180,
    "iq4_xs": 138,
    "iq3_s": 138,
}
"""Bytes of a packed block. The scales of 4 and 6 bits of these formats are widened to 8, and IQ3_S' indices of a grid
become 4 bits for each weight."""


def packed_bytes(kind: Kept, inputs: int, outputs: int, group: int, panel: int) -> int:
    """The bytes of a `PackedMatrix`, of its weights, scales, sums and zeros. `group` is 0 but for stored matrices with
    a scale by group; `panel` is `furrow_panel()`, or `panel_outputs()` of the host that packs."""
    room = -(-outputs // panel) * panel
    if kind in BLOCKS:
        return room * (inputs // FORMATS[kind].weights * BLOCK_BYTES[kind])
    if not group:
        if kind == INT8:  # codes are read by four, and an output has a scale and a sum
            return room * (-(-inputs // 4) * 4 + 8)
        return room * inputs * PACKED_FROM[kind].itemsize
    scales = room * -(-inputs // group)
    if kind == INT8:
        return room * -(-inputs // 4) * 4 + scales * 8
    if kind == E4M3:
        return room * inputs + scales * 4
    return room * inputs // 2 + scales * (1 if kind == E2M1 else 5)


class PackedMatrix:
    """Outputs [first, first + outputs) of a linear layer, all kept as `kind`. `struct` is for C++; the memory that it
    points to lives as long as this object."""

    def __init__(self, parts: Sequence[Weights], inputs: int, kind: Kept, first: int, threads: Threads) -> None:
        """`parts` lie one below the other. Plain numbers (outputs, inputs) are converted to `kind` and packed; stored
        matrices are all of `kind` and of one group."""
        number = threads.number(kind)
        panel = threads.library.furrow_panel()
        self.outputs = sum(part.shape[0] for part in parts)
        self._weights = zeros(threads.library.furrow_matrix_bytes(number, inputs, self.outputs), np.uint8)
        self._scales: NDArray[Any] = zeros(0, np.float32)
        self._sums = zeros(0, np.int32)
        self._zeros: NDArray[Any] = zeros(0, np.uint8)
        self._first = first
        self._kind = number
        self._group = 0
        grouped = [part for part in parts if isinstance(part, StoredMatrix) and not part.in_blocks]
        if grouped:
            self._group = grouped[0].group
            self._place_scales(grouped, panel)
        elif kind == "int8":
            room = -(-self.outputs // panel) * panel
            self._scales = zeros(room, np.float32)
            self._sums = zeros(room, np.int32)
        self._describe()
        self._pack(parts, inputs, kind, threads)

    def _place_scales(self, parts: list[StoredMatrix], panel: int) -> None:
        scales = _in_panels(np.concatenate([part.scales for part in parts if part.scales is not None]), panel)
        match parts[0].kind:
            case "e4m3":
                scales *= E4M3_UNIT
                self._scales = scales
            case "int8":
                scales /= LEVELS
                self._scales = scales
                self._sums = zeros(scales.size, np.int32)
            case "e2m1":  # its scales are bytes too
                self._zeros = scales
            case _:
                self._scales = scales
                of_parts = [
                    np.zeros(part.scales.shape, np.uint8) if part.zeros is None else part.zeros
                    for part in parts
                    if part.scales is not None
                ]
                self._zeros = _in_panels(np.concatenate(of_parts), panel)

    def _describe(self) -> None:
        """Set `struct`, which has the addresses of the memory, and `bytes`."""
        self.bytes = sum(part.nbytes for part in (self._weights, self._scales, self._sums, self._zeros))
        self.struct = Matrix(
            weights=_address(self._weights),
            scales=_address(self._scales),
            sums=_address(self._sums),
            first=self._first,
            outputs=self.outputs,
            kind=self._kind,
            zeros=_address(self._zeros),
            group=self._group,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "struct"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._describe()

    def _pack(self, parts: Sequence[Weights], inputs: int, kind: Kept, threads: Threads) -> None:
        address = ctypes.addressof(self.struct)
        first = 0
        for part in parts:
            whole = part.codes if isinstance(part, StoredMatrix) else part
            for start in range(0, len(whole), CHUNK):
                rows = whole[start : start + CHUNK]
                stored = np.ascontiguousarray(rows if isinstance(part, StoredMatrix) else _converted(rows, kind))
                threads.library.furrow_pack(threads.address, address, inputs, stored.ctypes.data, len(rows), first)
                first += len(rows)


def _address(memory: NDArray[Any]) -> int | None:
    return memory.ctypes.data if memory.size else None


def _converted(rows: NDArray[Any], kind: Kept) -> NDArray[Any]:
    """Plain numbers as the packing in C++ takes them."""
    dtype = PACKED_FROM.get(kind, PACKED_FROM["float32"])
    if rows.dtype == dtype:
        return rows
    if kind == "float16":
        wide = rows if rows.dtype.itemsize >= 4 else rows.astype(np.float32)
        rows = np.clip(wide, -LARGEST_HALF, LARGEST_HALF)  # saturates rather than overflows
    return rows.astype(dtype)


def _in_panels(numbers: NDArray[Any], panel: int) -> NDArray[Any]:
    """(outputs, groups) → (panels, groups, outputs of a panel), with zeros behind the last output."""
    outputs, groups = numbers.shape
    count = -(-outputs // panel)
    room = np.zeros((count * panel, groups), numbers.dtype)
    room[:outputs] = numbers
    panels = zeros(room.size, numbers.dtype).reshape(count, groups, panel)
    panels[...] = room.reshape(count, panel, groups).transpose(0, 2, 1)
    return panels
