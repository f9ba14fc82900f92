"""Memory of a matrix in the order in which the compiled products read it, and the view that C++ has of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from worker.native.library import BLOCKS, Matrix, Threads
from worker.native.memory import zeros
from worker.weights.formats import FORMATS
from worker.weights.schemes import E2M1, E4M3, INT8
from worker.weights.stored_matrix import StoredMatrix, Weights

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

BLOCK_BYTES = {name: FORMATS[name].bytes for name in BLOCKS} | {"q3_k": 114, "q4_k": 148, "q5_k": 180}
"""Bytes of a packed block. The scales of 6 bits of three formats are widened to 8."""


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
        number, panel = threads.number(kind), threads.library.furrow_panel()
        self.outputs = sum(part.shape[0] for part in parts)
        self._weights = zeros(threads.library.furrow_matrix_bytes(number, inputs, self.outputs), np.uint8)
        self._scales: NDArray[Any] = zeros(0, np.float32)
        self._sums = zeros(0, np.int32)
        self._zeros: NDArray[Any] = zeros(0, np.uint8)
        self._first, self._kind, self._group = first, number, 0
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
        address, first = ctypes.addressof(self.struct), 0
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
