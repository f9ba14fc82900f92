"""Memory of a matrix in the order in which the compiled products read it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from worker.native.library import KINDS, Matrix, Threads
from worker.native.zeros import zeros

CHUNK = 8192
"""Outputs that are packed at once, so that no second copy of the whole is made in another type."""

LARGEST_HALF = torch.finfo(torch.float16).max


class PackedMatrix:
    """Outputs [first, first + outputs) of a linear layer, all kept as `kind`. `struct` is for C++; the memory that it
    points to lives as long as this object."""

    def __init__(self, parts: list[Tensor], kind: torch.dtype, first: int, threads: Threads) -> None:
        """`parts` (outputs, inputs) lie one below the other; they are converted to `kind` and packed."""
        panel: int = threads.library.furrow_panel()
        outputs, inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        room = -(-outputs // panel) * panel
        steps = -(-inputs // 4) * 4 if kind == torch.int8 else inputs
        self._weights = zeros(room * steps, kind)
        self._scales, self._sums = torch.zeros(room), torch.zeros(room, dtype=torch.int32)
        self.outputs, self.bytes = outputs, self._weights.nbytes + self._scales.nbytes + self._sums.nbytes
        self.struct = Matrix(
            weights=self._weights.data_ptr(),
            scales=self._scales.data_ptr(),
            sums=self._sums.data_ptr(),
            first=first,
            outputs=outputs,
            kind=KINDS[kind],
        )
        self._pack(parts, kind, threads)

    def _pack(self, parts: list[Tensor], kind: torch.dtype, threads: Threads) -> None:
        source = torch.float32 if kind == torch.int8 else kind
        address, first = ctypes.addressof(self.struct), 0
        for part in parts:
            for rows in part.split(CHUNK):
                if source == torch.float16:
                    rows = rows.clamp(-LARGEST_HALF, LARGEST_HALF)  # saturates rather than overflows
                stored = rows.to(source).contiguous()
                threads.library.furrow_pack(
                    threads.address, address, rows.shape[1], stored.data_ptr(), rows.shape[0], first
                )
                first += rows.shape[0]
