"""Memory of a matrix in the order in which the compiled products read it, and the view that C++ has of it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worker.native.library import Matrix, Threads
from worker.native.zeros import zeros
from worker.weights.stored_matrix import StoredMatrix, Weights

CHUNK = 8192
"""Outputs that are packed at once, so that no second copy of the whole is made in another type."""

LARGEST_HALF = torch.finfo(torch.float16).max

E4M3_UNIT = 256.0
"""The products in C++ read numbers of 8 bits as 2^-8 of their value."""
LEVELS = 127
"""An activation that meets int8 codes has so many levels on each side of zero; the scales of outputs include it."""

Kept = torch.dtype | str
"""A kind of packed weights: the type of plain numbers, or a name in native/library.py."""


def name_of(kind: Kept) -> str:
    """The kind's name in native/library.py."""
    return kind if isinstance(kind, str) else str(kind).removeprefix("torch.")


class PackedMatrix:
    """Outputs [first, first + outputs) of a linear layer, all kept as `kind`. `struct` is for C++; the memory that it
    points to lives as long as this object."""

    def __init__(self, parts: Sequence[Weights], inputs: int, kind: Kept, first: int, threads: Threads) -> None:
        """`parts` lie one below the other. Plain numbers (outputs, inputs) are converted to `kind` and packed; stored
        matrices are all of `kind` and of one group."""
        number, panel = threads.number(name_of(kind)), threads.library.furrow_panel()
        self.outputs = sum(part.shape[0] for part in parts)
        self._weights = zeros(threads.library.furrow_matrix_bytes(number, inputs, self.outputs), torch.uint8)
        self._scales = torch.empty(0)
        self._sums = torch.empty(0, dtype=torch.int32)
        self._zeros = torch.empty(0, dtype=torch.uint8)
        self._first, self._kind, self._group = first, number, 0
        grouped = [part for part in parts if isinstance(part, StoredMatrix) and not part.in_blocks]
        if grouped:
            self._group = grouped[0].group
            self._place_scales(grouped, panel)
        elif kind == torch.int8:
            room = -(-self.outputs // panel) * panel
            self._scales = torch.zeros(room)
            self._sums = torch.zeros(room, dtype=torch.int32)
        self._describe()
        self._pack(parts, inputs, kind, threads)

    def _place_scales(self, parts: list[StoredMatrix], panel: int) -> None:
        scales = _in_panels(torch.cat([part.scales for part in parts if part.scales is not None]), panel)
        match parts[0].kind:
            case "e4m3":
                self._scales = scales * E4M3_UNIT
            case "int8":
                self._scales = scales / LEVELS
                self._sums = torch.zeros(scales.numel(), dtype=torch.int32)
            case "e2m1":  # its scales are bytes too
                self._zeros = scales
            case _:
                self._scales = scales
                of_parts = [
                    torch.zeros_like(part.scales, dtype=torch.uint8) if part.zeros is None else part.zeros
                    for part in parts
                    if part.scales is not None
                ]
                self._zeros = _in_panels(torch.cat(of_parts), panel)

    def _describe(self) -> None:
        """Set `struct`, which has the addresses of the memory, and `bytes`."""
        self.bytes = sum(part.nbytes for part in (self._weights, self._scales, self._sums, self._zeros))
        self.struct = Matrix(
            weights=self._weights.data_ptr(),
            scales=self._scales.data_ptr(),
            sums=self._sums.data_ptr(),
            first=self._first,
            outputs=self.outputs,
            kind=self._kind,
            zeros=self._zeros.data_ptr(),
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
            for rows in (part.codes if isinstance(part, StoredMatrix) else part).split(CHUNK):
                stored = (rows if isinstance(part, StoredMatrix) else _converted(rows, kind)).contiguous()
                threads.library.furrow_pack(threads.address, address, inputs, stored.data_ptr(), rows.shape[0], first)
                first += rows.shape[0]


def _converted(rows: Tensor, kind: Kept) -> Tensor:
    """Plain numbers as the packing in C++ takes them."""
    assert isinstance(kind, torch.dtype)
    if kind == torch.float16:
        rows = rows.clamp(-LARGEST_HALF, LARGEST_HALF)  # saturates rather than overflows
    return rows.to(torch.float32 if kind == torch.int8 else kind)


def _in_panels(numbers: Tensor, panel: int) -> Tensor:
    """(outputs, groups) → (panels, groups, outputs of a panel), with zeros behind the last output."""
    count = -(-numbers.shape[0] // panel)
    room = numbers.new_zeros(count * panel, numbers.shape[1])
    room[: numbers.shape[0]] = numbers
    return room.view(count, panel, -1).transpose(1, 2).contiguous()
