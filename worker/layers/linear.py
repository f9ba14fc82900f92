"""Linear layers whose weights lie as the compiled products read them, and embeddings that are read from there."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from worker.native import library
from worker.native.library import KINDS, Linear, Threads
from worker.native.zeros import zeros

CHUNK = 8192
"""Outputs that are packed at once, so that no second copy of the whole is made in another type."""

LARGEST_HALF = torch.finfo(torch.float16).max


class NativeLinear(nn.Module):
    """y = x · Wᵀ + b in float32. x (…, inputs) → y (…, outputs); the bits of a row don't depend on the others.

    `kind` is the type of the stored weights: float32, bfloat16 or float16, widened as they are read, or int8. With int8
    a weight has one scale per output and an activation one per row; sums are exact integers. NaN or infinity in a row
    gives NaN in that row alone.
    """

    def __init__(self, parts: list[Tensor], bias: Tensor | None, kind: torch.dtype, threads: Threads) -> None:
        """`parts` (outputs, inputs) of layers that share their input, as stored."""
        super().__init__()
        panel: int = threads.library.furrow_panel()
        self.outputs, self.inputs, self.kind = sum(part.shape[0] for part in parts), parts[0].shape[1], kind
        self.threads = threads
        room = -(-self.outputs // panel) * panel
        steps = -(-self.inputs // 4) * 4 if kind == torch.int8 else self.inputs
        self._weights = zeros(room * steps, kind)
        self._scales, self._sums = torch.zeros(room), torch.zeros(room, dtype=torch.int32)
        self.bias = None
        if bias is not None:
            padded = torch.zeros(room)
            padded[: self.outputs] = bias
            self.bias = nn.Parameter(padded, requires_grad=False)
        self.struct = Linear(
            weights=self._weights.data_ptr(),
            scales=self._scales.data_ptr(),
            sums=self._sums.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            kind=KINDS[kind],
        )
        self._address = ctypes.addressof(self.struct)
        self.packed_bytes = self._weights.nbytes + self._scales.nbytes + self._sums.nbytes
        self._pack(parts)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.contiguous()
        out = rows.new_empty(*rows.shape[:-1], self.outputs)
        threads, count = self.threads, rows.numel() // self.inputs
        room = torch.empty(threads.library.furrow_product_room(self._address, count), dtype=torch.uint8)
        threads.library.furrow_product(
            threads.address, self._address, rows.data_ptr(), count, out.data_ptr(), room.data_ptr()
        )
        return out

    def look_up(self, ids: Tensor) -> Tensor:
        """The weights of the outputs `ids` (…) as rows (…, inputs)."""
        wanted = ids.contiguous()
        out = torch.empty(*ids.shape, self.inputs)
        self.threads.library.furrow_look_up(self._address, wanted.data_ptr(), wanted.numel(), out.data_ptr())
        return out

    def _pack(self, parts: list[Tensor]) -> None:
        source = torch.float32 if self.kind == torch.int8 else self.kind
        first = 0
        for part in parts:
            for rows in part.split(CHUNK):
                if source == torch.float16:
                    rows = rows.clamp(-LARGEST_HALF, LARGEST_HALF)  # saturates rather than overflows
                stored = rows.to(source).contiguous()
                self.threads.library.furrow_pack(
                    self.threads.address, self._address, stored.data_ptr(), rows.shape[0], first
                )
                first += rows.shape[0]


class SharedEmbedding(nn.Module):
    """ids (…) → rows (…, hidden) in float32, from the packed head that they are tied to."""

    def __init__(self, head: NativeLinear, scale: Tensor | None) -> None:
        """`scale` is that of the families whose embedding multiplies by one."""
        super().__init__()
        self.weight = torch.empty(head.outputs, 0)  # only to say how many rows there are
        self._look_up, self._scale = head.look_up, scale

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._look_up(ids)
        return rows if self._scale is None else rows * self._scale


def threads_here() -> Threads | None:
    """Threads for a model's products; None where they can't be compiled or aren't wanted."""
    loaded = library.library()
    return None if loaded is None else Threads(loaded)
