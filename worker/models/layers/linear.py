"""Linear layers whose weights lie as the compiled products read them, and embeddings that are read from there."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worker.native.library import MOST_MATRICES, Linear, Matrix, Threads, load_library
from worker.selftest.shapes import Shapes
from worker.weights.packed_matrix import Kept, PackedMatrix
from worker.weights.stored_matrix import StoredMatrix, Weights


class NativeLinear(nn.Module):
    """y = x · Wᵀ + b in float32. x (…, inputs) → y (…, outputs); the bits of a row don't depend on the others.

    Weights of 32 or 16 bits are widened as they are read. With int8 a weight has one scale per output and an activation
    one per row; with blocks a weight has its file's scales and an activation one for each 32 inputs. Sums over a scale
    are exact integers. Codes with a scale by group are widened too, and scaled once a group. NaN or infinity in a row
    gives NaN in that row alone.
    """

    def __init__(self, parts: Sequence[Weights], bias: Tensor | None, kinds: Sequence[Kept], threads: Threads) -> None:
        """`parts` (outputs, inputs) of layers that share their input, as stored; `kinds[i]` is the type in which
        `parts[i]` is kept: float32, bfloat16, float16 or int8, or the kind of a stored matrix. Raises
        ValueError where the kinds change more than twice from part to part."""
        super().__init__()
        self.outputs, self.inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.threads = threads
        self._matrices: list[PackedMatrix] = []
        first = 0
        for (kind, _), run in itertools.groupby(zip(parts, kinds, strict=True), _kind_and_group):
            self._matrices.append(PackedMatrix([part for part, _ in run], self.inputs, kind, first, threads))
            first += self._matrices[-1].outputs
        if len(self._matrices) > MOST_MATRICES:
            raise ValueError(f"{len(self._matrices)} kinds of weights in one product; {MOST_MATRICES} fit")
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(self.padded(bias), requires_grad=False)
        self._describe()

    def _describe(self) -> None:
        """Set `struct`, which has the addresses of the memory, and `packed_bytes`."""
        self.struct = Linear(
            matrices=(Matrix * MOST_MATRICES)(*(matrix.struct for matrix in self._matrices)),
            bias=None if self.bias is None else self.bias.data_ptr(),
            inputs=self.inputs,
            outputs=self.outputs,
            count=len(self._matrices),
        )
        self._address = ctypes.addressof(self.struct)
        self.packed_bytes = sum(matrix.bytes for matrix in self._matrices)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("struct", "_address")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._describe()

    def padded(self, bias: Tensor) -> Tensor:
        """A bias with the room behind it that the products read."""
        room = torch.zeros(self.outputs + self.threads.library.furrow_panel())
        room[: self.outputs] = bias
        return room

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


def _kind_and_group(kept: tuple[Weights, Kept]) -> tuple[Kept, int]:
    """Neighbours that are equal in it are one matrix."""
    part, kind = kept
    return kind, part.group if isinstance(part, StoredMatrix) else 0


class PackedEmbedding(nn.Module):
    """ids (…) → rows (…, hidden) in float32, looked up in packed weights: those of the tied head, or its own."""

    def __init__(self, table: NativeLinear, embedding: nn.Module, own: bool = False) -> None:
        """Replaces `embedding`, whose scale some families have. `own`: the table is no part of another module."""
        super().__init__()
        self.weight = torch.empty(table.outputs, 0)  # only to say how many rows there are
        self.table = table if own else None
        self._look_up, self._scale = table.look_up, getattr(embedding, "embed_scale", None)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._look_up(ids)
        return rows if self._scale is None else rows * self._scale


def threads_here(kinds: Iterable[str] | None = None, shapes: Shapes | None = None) -> Threads | None:
    """As many threads as torch has here, for products of a model's `shapes` with weights of `kinds`
    (native/library.py), or of all; None where they can't be compiled or aren't wanted."""
    loaded = load_library(kinds, shapes)
    return None if loaded is None else Threads(loaded, torch.get_num_threads())
