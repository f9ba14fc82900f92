"""Memory of a matrix in the order in which the compiled products read it."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.native.library import Matrix, Threads
from worker.native.zeros import zeros
from worker.weights.formats import BlockFormat

CHUNK = 8192
"""Outputs that are packed at once, so that no second copy of the whole is made in another type."""

LARGEST_HALF = torch.finfo(torch.float16).max


class Groups(NamedTuple):
    """Weights in codes with a scale by `group` inputs: `kind` is e4m3, int4, e2m1, or int8, whose group is all inputs
    and whose activations are rounded to 8 bits too."""

    kind: str
    group: int


Kept = torch.dtype | BlockFormat | Groups
"""A kind of packed weights."""


def name_of(kind: Kept) -> str:
    """The kind's name in native/kinds.py."""
    if isinstance(kind, torch.dtype):
        return str(kind).removeprefix("torch.")
    return kind.name if isinstance(kind, BlockFormat) else kind.kind


class PackedMatrix:
    """Outputs [first, first + outputs) of a linear layer, all kept as `kind`. `struct` is for C++; the memory that it
    points to lives as long as this object."""

    def __init__(
        self, parts: list[Tensor], inputs: int, kind: torch.dtype | BlockFormat, first: int, threads: Threads
    ) -> None:
        """`parts` lie one below the other. They are (outputs, inputs), converted to `kind` and packed; for a format of
        blocks they are the blocks' bytes (outputs, row bytes)."""
        number, panel = threads.number(name_of(kind)), threads.library.furrow_panel()
        self.outputs = sum(part.shape[0] for part in parts)
        self._weights = zeros(threads.library.furrow_matrix_bytes(number, inputs, self.outputs), torch.uint8)
        self._scales, self._sums = torch.empty(0), torch.empty(0, dtype=torch.int32)
        if kind == torch.int8:
            room = -(-self.outputs // panel) * panel
            self._scales, self._sums = torch.zeros(room), torch.zeros(room, dtype=torch.int32)
        self._first, self._kind = first, number
        self._describe()
        self._pack(parts, inputs, kind, threads)

    def _describe(self) -> None:
        """Set `struct`, which has the addresses of the memory, and `bytes`."""
        self.bytes = self._weights.nbytes + self._scales.nbytes + self._sums.nbytes
        self.struct = Matrix(
            weights=self._weights.data_ptr(),
            scales=self._scales.data_ptr(),
            sums=self._sums.data_ptr(),
            first=self._first,
            outputs=self.outputs,
            kind=self._kind,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "struct"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._describe()

    def _pack(self, parts: list[Tensor], inputs: int, kind: torch.dtype | BlockFormat, threads: Threads) -> None:
        address, first = ctypes.addressof(self.struct), 0
        for part in parts:
            for rows in part.split(CHUNK):
                stored = _converted(rows, kind).contiguous()
                threads.library.furrow_pack(threads.address, address, inputs, stored.data_ptr(), rows.shape[0], first)
                first += rows.shape[0]


def _converted(rows: Tensor, kind: torch.dtype | BlockFormat) -> Tensor:
    """The rows as the packing in C++ takes them."""
    if isinstance(kind, BlockFormat):
        return rows
    if kind == torch.float16:
        rows = rows.clamp(-LARGEST_HALF, LARGEST_HALF)  # saturates rather than overflows
    return rows.to(torch.float32 if kind == torch.int8 else kind)
