"""Tensors of a quantized checkpoint by the names of plain ones: weights of linear layers come at their stored width.

Formulas, with group g = i // group of input i, for the weight of output o:

- fp8: w = e4m3[o, i] · weight_scale_inv[o // block, i // block] (transformers, integrations/finegrained_fp8.py), or
  with one `weight_scale` by tensor or output. Activations stay floats.
- compressed-tensors (compressors/quantized_compressors): pack-quantized w = (q - z) · weight_scale[o, g], both codes
  stored plus 8; float-quantized like fp8; int-quantized w = q · weight_scale[o], with activations rounded to ± 127 of a
  token's largest, as vLLM does (csrc/quantization/w8a8/int8).
- AutoAWQ (awq/utils/packing_utils.py): w = (q - z) · scales[g, o]; `qweight` (inputs, outputs / 8) and `qzeros` hold
  the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, from the lowest bits up.
- AutoGPTQ (nn_modules/qlinear): w = (q - z) · scales[g, o]; `qweight` (inputs / 8, outputs) holds eight inputs,
  `qzeros` (groups, outputs / 8) eight outputs, stored less one (format `gptq`) or as they are (`gptq_v2`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.weights.checkpoint import Checkpoint, Ranges
from worker.weights.formats import StoredTensor
from worker.weights.quantized_layers import QuantizedLinear, borders, layers
from worker.weights.schemes import E4M3, INT4, Scheme
from worker.weights.stored_matrix import StoredMatrix, joined

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NAN_CODE = 0x7F
"""The magnitude of both NaNs of e4m3."""


class QuantizedCheckpoint(Checkpoint):
    """A checkpoint whose `read` of a quantized layer's weight gives a `StoredMatrix`."""

    def __init__(self, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> None:
        """Raises ModelFilesError or UnsupportedArchitecture for tensors that do not fit the scheme."""
        super().__init__(tensors)
        self._scheme = scheme
        self._layers = {f"{module}.weight": layer for module, layer in layers(scheme, tensors).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._layers or super().__contains__(name)

    @property
    def borders(self) -> tuple[int, ...]:
        """The inputs of feed-forward layers that stay together, at whose multiples the ranks' shares end; the largest
        first."""
        return borders({name.removesuffix(".weight"): layer for name, layer in self._layers.items()})

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Any:
        """A plain tensor as in a plain checkpoint; of a quantized layer, whole groups as a `StoredMatrix`."""
        linear = self._layers.get(name)
        if linear is None:
            return super().read(name, dim, ranges)
        if ranges is not None and len(ranges) > 1:
            if dim == 1:
                raise UnsupportedArchitecture(f"{linear.weight} would be shared in several pieces. Use --tp 1.")
            return joined([self.read(name, dim, [piece]) for piece in ranges])
        [(start, stop)] = ranges or [(0, linear.outputs)]
        rows = (0, linear.outputs)
        columns = (0, linear.inputs)
        rows, columns = (rows, (start, stop)) if dim == 1 else ((start, stop), columns)
        group = linear.group if linear.group < linear.inputs else columns[1] - columns[0]
        if columns[0] % linear.unit:
            raise UnsupportedArchitecture(
                f"{linear.weight}: inputs from {columns[0]} on cut a unit of {linear.unit}. Use --tp 1."
            )
        if linear.kind != INT4:
            return self._eight_bits(linear, rows, columns, group)
        return self._four_bits(linear, rows, columns, group)

    def _eight_bits(
        self, linear: QuantizedLinear, rows: tuple[int, int], columns: tuple[int, int], group: int
    ) -> StoredMatrix:
        codes = np.ascontiguousarray(self._slice(linear.weight, rows, columns)).view(np.uint8)
        if linear.kind == E4M3 and bool(((codes & NAN_CODE) == NAN_CODE).any()):
            raise ModelFilesError(f"{linear.weight} holds NaN. Download the checkpoint again.")
        scales = self._scales(linear).reshape(-(-linear.outputs // linear.rows), -1)
        scales = np.repeat(scales, linear.rows, axis=0)[rows[0] : rows[1]]
        return StoredMatrix(linear.kind, codes, _groups(scales, linear, columns), None, group)

    def _four_bits(
        self, linear: QuantizedLinear, rows: tuple[int, int], columns: tuple[int, int], group: int
    ) -> StoredMatrix:
        if self._scheme.method == "compressed-tensors":
            words = self._slice(linear.weight, rows, (columns[0] // 8, columns[1] // 8))
            scales = self._scales(linear)
            zeros = np.full(scales.shape, 8, np.uint8)
            if linear.zeros is not None:
                zeros = _nibbles(super().read(linear.zeros).T).T[: linear.outputs]
        else:
            words = self._words_by_output(linear, rows, columns)
            scales = self._scales(linear).T
            zeros = self._zeros(linear)
        scales, zeros = (_groups(numbers[rows[0] : rows[1]], linear, columns) for numbers in (scales, zeros))
        return StoredMatrix(INT4, np.ascontiguousarray(words).view(np.uint8), scales, zeros, group)

    def _words_by_output(
        self, linear: QuantizedLinear, rows: tuple[int, int], columns: tuple[int, int]
    ) -> NDArray[Any]:
        """(outputs, inputs / 8) of int32, or the same in bytes, from what is stored by input."""
        if self._scheme.method == "gptq":
            self._check_order(linear)
            return self._slice(linear.weight, (columns[0] // 8, columns[1] // 8), rows).T
        first = rows[0] // 8
        last = -(-rows[1] // 8)
        words = self._slice(linear.weight, columns, (first, last))
        codes = _nibbles(words, AWQ_ORDER)[:, rows[0] - 8 * first : rows[1] - 8 * first].T
        return codes[:, 0::2] | (codes[:, 1::2] << 4)

    def _zeros(self, linear: QuantizedLinear) -> NDArray[Any]:
        """(outputs, groups) in uint8."""
        assert linear.zeros is not None
        if self._scheme.method == "awq":
            return _nibbles(super().read(linear.zeros), AWQ_ORDER).T
        return ((_nibbles(super().read(linear.zeros)) + self._scheme.zero_offset) & 15).T

    def _check_order(self, linear: QuantizedLinear) -> None:
        name = linear.weight.removesuffix("qweight") + "g_idx"
        if super().__contains__(name) and not self.is_blank:
            order = super().read(name)
            if not np.array_equal(order, np.arange(linear.inputs) // linear.group):
                raise UnsupportedArchitecture(
                    f"{name}: the groups are in the order of activations (desc_act), which is not supported. Use a "
                    "checkpoint that was made with desc_act = false."
                )

    def _scales(self, linear: QuantizedLinear) -> NDArray[np.float32]:
        scales = super().read(linear.scale).astype(np.float32)
        if not bool(np.isfinite(scales).all()):
            raise ModelFilesError(f"{linear.scale} holds NaN or infinity. Download the checkpoint again.")
        return scales

    def _slice(self, name: str, rows: tuple[int, int], columns: tuple[int, int]) -> NDArray[Any]:
        return super().read(name)[rows[0] : rows[1], columns[0] : columns[1]]


def _groups(numbers: NDArray[Any], linear: QuantizedLinear, columns: tuple[int, int]) -> NDArray[Any]:
    """Of numbers (outputs, groups) those of the groups that hold the columns."""
    if linear.group >= linear.inputs:
        return np.ascontiguousarray(numbers)
    return np.ascontiguousarray(numbers[:, columns[0] // linear.group : -(-columns[1] // linear.group)])


def _nibbles(words: NDArray[Any], order: tuple[int, ...] = tuple(range(8))) -> NDArray[Any]:
    """int32 (rows, words) → uint8 (rows, 8 · words); `order[k]` is the place of the k-th four bits, lowest first."""
    codes = np.ascontiguousarray(words).view(np.uint8)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(words.shape[0], words.shape[1], 8)
    places = sorted(range(8), key=lambda bits: order[bits])
    return pairs[:, :, places].reshape(words.shape[0], -1)
