"""Tensors of GGUF files by transformers' names, read by the slice as `Checkpoint` reads safetensors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from control.errors import ModelFilesError
from worker.families.gguf import KEYS_OF_HEADS, RATES, VALUES_OF_HEADS, expert_of, fused_name
from worker.weights.checkpoint import MappedTensors, Ranges, ranges_of
from worker.weights.dequantize import dequantize
from worker.weights.formats import StoredTensor
from worker.weights.gguf import GgufModel, architecture_of
from worker.weights.stored_matrix import StoredMatrix, Weights, joined

_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")
"""Small, and their scores decide which experts are used: always plain numbers."""
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ROWS_OF_ONE = ("alpha_p", "alpha_n")
_RECURRENT_NORM = "ssm_norm.weight"
_FLAT = (".ssm_a", ".ssm_d", _RECURRENT_NORM)
"""Numbers by head, or by group of heads, that files of Mamba layers have as matrices."""
_PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": bfloat16}


class GgufCheckpoint(MappedTensors):
    """The tensors of a model; open only inside `with`. Blocks stay blocks unless `dequantized`."""

    def __init__(self, model: GgufModel, dequantized: bool) -> None:
        super().__init__(model.tensors)
        self._model = model
        self._family, self._kind = architecture_of(model)
        self._dequantized = dequantized

    def __contains__(self, name: str) -> bool:
        halves = self._halves(name)
        return self._place(name) is not None if halves is None else halves[0] in self._model.tensors

    @property
    def borders(self) -> tuple[int, ...]:
        """Multiples of inputs at which a rank's share of a feed-forward width may end; the largest first."""
        return self._model.borders

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Weights:
        """The tensor `name`, or only its `ranges` along `dim`, joined. Raises ModelFilesError naming a missing one, or
        one whose blocks a border would cut."""
        if name.endswith(".kv_b_proj.weight"):
            return self._heads(name.removesuffix("kv_b_proj.weight"), ranges)
        if (number := self._number(name)) is not None:
            return number
        if (halves := self._halves(name)) is not None:
            return self._of_halves(*halves, ranges)
        location = self._place(name)
        if location is None:
            raise self._missing(self._kind.stored_name(name) or name)
        stored, place, half = location
        self._unread.pop(stored, None)
        if (expert := expert_of(name)) is not None:
            place = _slice(stored, place, expert)
        if half is not None:
            place = _half(place, half)
        whole = self._whole(stored, place)
        if stored.endswith(_FLAT) and not isinstance(whole, StoredMatrix):
            whole = whole.reshape(-1)
        if stored.endswith(RATES):
            whole = self._rates(whole, 0 if name.endswith("in_proj_b.weight") else 1)
        if isinstance(whole, StoredMatrix):
            part = self._block_ranges(stored, whole, dim, ranges)
        else:
            part = ranges_of(whole, dim, ranges)
        if isinstance(part, StoredMatrix):
            return dequantize(part) if self._dequantized or stored.endswith(_ROUTERS) else part
        if self._family.norm_offset and stored.endswith("norm.weight") and not stored.endswith(_RECURRENT_NORM):
            return part - part.dtype.type(1)
        return _as_transformers(stored, part)

    def _halves(self, name: str) -> tuple[str, str] | None:
        """The tensors with the upper and the lower rows of a matrix that files have as two; None for any other."""
        match = _IN_LAYER.fullmatch(name)
        halves = None if match is None else self._kind.halves.get(match[2])
        return (
            None if match is None or halves is None else (f"blk.{match[1]}.{halves[0]}", f"blk.{match[1]}.{halves[1]}")
        )

    def _of_halves(self, upper: str, lower: str, ranges: Ranges | None) -> Weights:
        """The rows `ranges` of two matrices of one shape, one above the other: of both the same ones, or all."""
        parts = list[Weights]()
        for name in (upper, lower):
            place = self._model.tensors.get(name)
            if place is None:
                raise self._missing(name)
            self._unread.pop(name, None)
            whole = self._whole(name, place)
            start, stop = (0, place.shape[0]) if ranges is None else ranges[0]
            parts.append(whole.rows(start, stop) if isinstance(whole, StoredMatrix) else whole[start:stop])
        blocks = [part for part in parts if isinstance(part, StoredMatrix)]
        if len(blocks) == len(parts) and not self._dequantized and len({block.kind for block in blocks}) == 1:
            return joined(blocks)
        return np.concatenate([_numbers(part) for part in parts])

    def _missing(self, name: str) -> ModelFilesError:
        return ModelFilesError(f"{self._model.files[0]} has no tensor {name}; is it whole?")

    def _number(self, name: str) -> NDArray[np.float32] | None:
        """A parameter that the metadata have, one number or a row of one; None for any other."""
        match = _IN_LAYER.fullmatch(name)
        key = None if match is None else self._kind.numbers.get(match[2])
        if match is None or key is None:
            return None
        numbers = self._model.array(key).numbers()
        layer = int(match[1])
        if layer >= len(numbers) or not isinstance(numbers[layer], int | float):
            raise self._model.wrong(key, numbers[:4], f"a number for layer {layer} is needed")
        value = np.asarray(numbers[layer], np.float32)
        return value.reshape(1) if name.endswith(_ROWS_OF_ONE) else value

    def _heads(self, attention: str, ranges: Ranges | None) -> NDArray[Any]:
        """Keys above values for each head, as transformers has them, of the rows `ranges`: plain numbers, of two
        tensors with a matrix for each head."""
        keys, values = (self._of_heads(f"{attention}{name}.weight") for name in (KEYS_OF_HEADS, VALUES_OF_HEADS))
        rows = np.concatenate([keys.transpose(0, 2, 1), values], axis=1).reshape(-1, values.shape[2])
        return ranges_of(rows, 0, ranges)

    def _of_heads(self, name: str) -> NDArray[Any]:
        stored = self._kind.stored_name(name) or name
        place = self._model.tensors.get(stored)
        if place is None or len(place.shape) != 3:
            raise ModelFilesError(
                f"{self._model.files[0]} has no tensor {stored} of matrices. Convert the model again."
            )
        self._unread.pop(stored, None)
        return _numbers(self._whole(stored, place)).reshape(place.shape)

    def _place(self, name: str) -> tuple[str, StoredTensor, int | None] | None:
        """The tensor in the file that has transformers' parameter `name`, and which half of its rows where it is fused
        with another one."""
        stored = self._kind.stored_name(name)
        tensors = self._model.tensors
        if stored is None:
            return None
        if stored in tensors:
            return stored, tensors[stored], None
        fused = fused_name(stored)
        return None if fused is None or fused[0] not in tensors else (fused[0], tensors[fused[0]], fused[1])

    def _rates(self, whole: Weights, half: int) -> Weights:
        """The rows of beta (0) or alpha (1)."""
        keys = self._model.whole(f"{self._model.architecture}.ssm.group_count")
        rows = whole.codes if isinstance(whole, StoredMatrix) else whole
        half_rows = rows.reshape(keys, 2, -1, rows.shape[-1])[:, half].reshape(-1, rows.shape[-1])
        return StoredMatrix(whole.kind, half_rows) if isinstance(whole, StoredMatrix) else half_rows

    def _whole(self, name: str, place: StoredTensor) -> Weights:
        """A view of the file, rows in transformers' order."""
        if place.type.blocks is not None:
            rows = self._data(place, 1).reshape(-1, place.type.blocks.row_bytes(place.shape[-1]))
            return StoredMatrix(place.type.name, self._ordered(name, rows))
        return self._ordered(
            name, self._data(place, place.type.bytes).view(_PLAIN[place.type.name]).reshape(place.shape)
        )

    def _block_ranges(self, name: str, whole: StoredMatrix, dim: int | None, ranges: Ranges | None) -> Weights:
        if dim is None or ranges is None:
            return whole
        try:
            parts = [whole.rows(*piece) if dim == 0 else whole.columns(*piece) for piece in ranges]
        except ValueError as error:
            if not self._dequantized:
                raise ModelFilesError(f"{self._model.files[0]}: {name}: {error}. Use --dequantize.") from error
            return ranges_of(dequantize(whole), 1, ranges)
        return (
            StoredMatrix(whole.kind, np.concatenate([block.codes for block in parts], axis=dim))
            if len(parts) > 1
            else parts[0]
        )

    def _ordered(self, name: str, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of a llama's query and key projections: pairs are halves of a head for transformers, and neighbours in
        the file."""
        arch = self._model.architecture
        leaf = name.split(".")[-2]
        if not self._kind.permuted or leaf not in ("attn_q", "attn_k"):
            return rows
        heads = self._model.whole(f"{arch}.attention.head_count")
        if leaf == "attn_k":
            heads = max(self._model.numbers(f"{arch}.attention.head_count_kv", heads))
        order = np.arange(rows.shape[0]).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)
        return rows[order]


def _numbers(weights: Weights) -> NDArray[Any]:
    return dequantize(weights) if isinstance(weights, StoredMatrix) else weights


def _as_transformers(name: str, part: NDArray[Any]) -> NDArray[Any]:
    """Plain numbers of a recurrent layer, or of the gate of a shared expert, in transformers' form."""
    if name.endswith(".ssm_a"):  # -exp(A_log)
        if not (part <= 0).all():
            raise ModelFilesError(
                f"{name} has the value {float(part.max()):g}; a decay is 0 or less. Convert the model again."
            )
        return np.log(-part.astype(np.float64))
    if name.endswith((".ssm_conv1d.weight", ".shortconv.conv.weight")):
        return part[:, None]
    return part.reshape(1, -1) if name.endswith(_ROUTERS[1]) else part


def _half(place: StoredTensor, half: int) -> StoredTensor:
    """The first (0) or second (1) half of the rows of a matrix."""
    size = place.bytes // 2
    return replace(place, shape=(place.shape[0] // 2, *place.shape[1:]), start=place.start + half * size, bytes=size)


def _slice(name: str, place: StoredTensor, index: int) -> StoredTensor:
    """One matrix, or bias, of a tensor that has several. Raises ModelFilesError where there are not so many."""
    count = place.shape[0]
    if len(place.shape) != (2 if name.endswith(".bias") else 3) or index >= count:
        raise ModelFilesError(f"{place.path}: tensor {name} of shape {place.shape} has no expert {index}.")
    size = place.bytes // count
    return replace(place, shape=place.shape[1:], start=place.start + index * size, bytes=size)
