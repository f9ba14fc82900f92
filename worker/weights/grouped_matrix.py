"""Memory of a matrix of codes with scales by group, in the order in which the compiled products read it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from worker.native.library import Matrix, Threads
from worker.native.zeros import zeros
from worker.weights.packed_matrix import Groups

E4M3_UNIT = 256.0
"""The products in C++ read numbers of 8 bits as 2^-8 of their value."""
LEVELS = 127
"""An activation that meets int8 codes has so many levels on each side of zero; the scales of outputs include it."""


class GroupedMatrix:
    """Outputs [first, first + outputs) of a linear layer. `struct` is for C++; the memory that it points to lives as
    long as this object."""

    def __init__(
        self, parts: list[tuple[Tensor, Tensor, Tensor | None]], inputs: int, kind: Groups, first: int, threads: Threads
    ) -> None:
        """`parts` lie one below the other: codes (outputs, row bytes), scales (outputs, groups) and zeros, as in
        `Grouped`."""
        self.outputs = sum(codes.shape[0] for codes, _, _ in parts)
        number, panel = threads.number(kind.kind), threads.library.furrow_panel()
        scales = _in_panels(torch.cat([one for _, one, _ in parts]), panel)
        self._scales, self._zeros = scales, torch.empty(0, dtype=torch.uint8)
        self._sums = torch.empty(0, dtype=torch.int32)
        if kind.kind == "e4m3":
            self._scales = scales * E4M3_UNIT
        elif kind.kind == "int8":
            self._scales = scales / LEVELS
            self._sums = torch.zeros(scales.numel(), dtype=torch.int32)
        elif kind.kind == "e2m1":  # its scales are bytes too
            self._scales, self._zeros = torch.empty(0), scales
        else:
            zeros_of = [torch.zeros_like(one, dtype=torch.uint8) if zero is None else zero for _, one, zero in parts]
            self._zeros = _in_panels(torch.cat(zeros_of), panel)
        self._weights = zeros(threads.library.furrow_matrix_bytes(number, inputs, self.outputs), torch.uint8)
        self._first, self._kind, self._group = first, number, kind.group
        self._describe()
        address, place = ctypes.addressof(self.struct), 0
        for codes, _, _ in parts:
            stored = codes.contiguous()
            threads.library.furrow_pack(threads.address, address, inputs, stored.data_ptr(), len(stored), place)
            place += len(stored)

    def _describe(self) -> None:
        """Set `struct`, which has the addresses of the memory, and `bytes`."""
        self.bytes = self._weights.nbytes + self._scales.nbytes + self._zeros.nbytes + self._sums.nbytes
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


def _in_panels(numbers: Tensor, panel: int) -> Tensor:
    """(outputs, groups) → (panels, groups, outputs of a panel), with zeros behind the last output."""
    count = -(-numbers.shape[0] // panel)
    room = numbers.new_zeros(count * panel, numbers.shape[1])
    room[: numbers.shape[0]] = numbers
    return room.view(count, panel, -1).transpose(1, 2).contiguous()
