"""Weights that lie as the compiled products read them, and embeddings: look-ups in them or in plain rows."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.collective.base import Link
from worker.models.native.module import Module, Numbers, address_of
from worker.native.library import MOST_MATRICES, Linear, Matrix, Threads
from worker.native.memory import empty
from worker.weights.stored_matrix import PackedMatrix, StoredMatrix

HALVES = ("float16", "bfloat16")


class PackedLinear(Module):
    """y = x · Wᵀ + b in float32. The bits of a row don't depend on the others.

    Weights of 32 or 16 bits are widened as they are read. With int8 a weight has one scale per output and an activation
    one per row; with blocks a weight has its file's scales and an activation one for each 32 inputs. Sums over a scale
    are exact integers. Codes with a scale by group are widened too, and scaled once a group. NaN or infinity in a row
    gives NaN in that row alone.
    """

    summed = False
    """True if its outputs are a part of a sum over the ranks."""

    def __init__(self, parts: Sequence[Any], bias: NDArray[Any] | None, kinds: Sequence[str], threads: Threads) -> None:
        """`parts` (outputs, inputs) of layers that share their input, as stored; `kinds[i]` is the type in which
        `parts[i]` is kept: float32, bfloat16, float16 or int8, or the kind of a stored matrix. Raises
        ValueError where the kinds change more than twice from part to part."""
        self.outputs = sum(part.shape[0] for part in parts)
        self.inputs = parts[0].shape[1]
        self.threads = threads
        self._matrices: list[PackedMatrix] = []
        first = 0
        for kind, run in runs(parts, kinds):
            self._matrices.append(PackedMatrix(run, self.inputs, kind, first, threads))
            first += self._matrices[-1].outputs
        if len(self._matrices) > MOST_MATRICES:
            raise ValueError(f"{len(self._matrices)} kinds of weights in one product; {MOST_MATRICES} fit")
        self.bias = None if bias is None else self._padded(bias)
        self._describe()

    def _describe(self) -> None:
        """Set `struct`, which has the addresses of the memory."""
        self.struct = Linear(
            matrices=(Matrix * MOST_MATRICES)(*(matrix.struct for matrix in self._matrices)),
            bias=address_of(self.bias),
            inputs=self.inputs,
            outputs=self.outputs,
            count=len(self._matrices),
        )
        self._address = ctypes.addressof(self.struct)

    @property
    def packed_bytes(self) -> int:
        """Of the weights, without the bias."""
        return sum(matrix.bytes for matrix in self._matrices)

    def own_numbers(self) -> Iterator[Any]:
        yield from super().own_numbers()
        yield from (_Bytes(matrix.bytes) for matrix in self._matrices)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("struct", "_address")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._describe()

    def _padded(self, bias: NDArray[Any]) -> NDArray[Any]:
        """A bias with the room behind it that the products read."""
        room = np.zeros(self.outputs + self.threads.library.furrow_panel(), np.float32)
        room[: self.outputs] = bias
        return room

    def product(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """inputs (…, inputs) float32 → (…, outputs) float32."""
        rows = np.ascontiguousarray(inputs)
        out = empty((*rows.shape[:-1], self.outputs), np.float32)
        threads = self.threads
        count = rows.size // self.inputs
        room = empty(threads.library.furrow_product_room(self._address, count), np.uint8)
        threads.library.furrow_product(
            threads.address, self._address, rows.ctypes.data, count, out.ctypes.data, room.ctypes.data
        )
        return out

    def look_up(self, ids: NDArray[Any]) -> NDArray[Any]:
        """The weights of the outputs `ids` (…) int64 as rows (…, inputs) float32."""
        ids = np.ascontiguousarray(ids)
        out = empty((*ids.shape, self.inputs), np.float32)
        self.threads.library.furrow_look_up(self._address, ids.ctypes.data, ids.size, out.ctypes.data)
        return out


class _Bytes:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def runs(parts: Sequence[Any], kinds: Sequence[str]) -> Iterator[tuple[str, list[Any]]]:
    """The parts that lie in one matrix, with its kind; `parts` and `kinds` are those of `PackedLinear`."""
    for (kind, _), run in itertools.groupby(zip(parts, kinds, strict=True), _kind_and_group):
        yield kind, [part for part, _ in run]


def _kind_and_group(part_and_kind: tuple[Any, str]) -> tuple[str, int]:
    """Neighbours that are equal in it are one matrix."""
    part, kind = part_and_kind
    return kind, part.group if isinstance(part, StoredMatrix) else 0


def kept_as(part: Any, quant: str | None) -> str:
    """The kind in which weights, a tensor too, are packed. Quantized weights and 16 bits of the checkpoint stay
    what they are: they lose nothing, and float32 would only be more to read."""
    if isinstance(part, StoredMatrix):
        return part.kind
    if quant == "int8":
        return "int8"
    kind = str(part.dtype).removeprefix("torch.")
    if kind in HALVES:
        return kind
    return "float32" if quant is None else "float16"


class Embedding(Module):
    """ids (…) int64 → rows (…, hidden) in float32, multiplied by `scale`. The table is of 32 or 16 bits."""

    def __init__(self, weight: Numbers, scale: float | None) -> None:
        self.weight = weight
        self.scale = scale

    def __call__(self, ids: NDArray[Any]) -> NDArray[Any]:
        assert isinstance(self.weight, np.ndarray)
        rows = self.weight[ids].astype(np.float32, copy=False)
        return rows if self.scale is None else rows * np.float32(self.scale)


class PackedEmbedding(Module):
    """ids (…) int64 → rows (…, hidden) in float32, looked up in packed weights: those of the tied head, or its own."""

    def __init__(self, table: PackedLinear, scale: float | None) -> None:
        self.table = table
        self.scale = scale

    def __call__(self, ids: NDArray[Any]) -> NDArray[Any]:
        rows = self.table.look_up(ids)
        return rows if self.scale is None else rows * np.float32(self.scale)


class PackedExperts(Module):
    """The experts of a layer as linear layers: `gate_up[i]` (hidden → 2 · width, or width
    where they have no gate) and `down[i]` (width → hidden)."""

    def __init__(self, gate_up: list[PackedLinear], down: list[PackedLinear], summed: bool) -> None:
        """`summed`: their outputs are a part of a sum over the ranks."""
        self.gate_up = gate_up
        self.down = down
        self.summed = summed


class PackedHeads(Module):
    """The matrices of each head of this rank over compressed keys and values: `keys[i]` makes of a query what is
    compared with the row that all heads share, `values[i]` makes the head's output of what it mixed of such rows."""

    def __init__(self, keys: list[PackedLinear], values: list[PackedLinear]) -> None:
        self.keys = keys
        self.values = values


class SplitEmbedding(Module):
    """Each rank looks up the ids from `start` on that it holds; ids of others give zeros, and the sum is complete."""

    def __init__(self, rows: Embedding | PackedEmbedding, start: int, count: int, link: Link) -> None:
        """`rows` holds `count` rows, from `start` on."""
        self.rows = rows
        self.start = start
        self.count = count
        self._link = link

    def __call__(self, ids: NDArray[Any]) -> NDArray[Any]:
        local = ids - self.start
        mine = (local >= 0) & (local < self.count)
        vectors = self.rows(np.where(mine, local, 0))
        vectors[~mine] = 0
        return self._link.collective.all_reduce(vectors)
