"""Checkpoints that store the experts of a layer together, as gpt_oss and gemma4 are published, by the names of single
experts.

In gpt_oss `gate_up_proj` (experts, hidden, 2 · width) has gate and up in turn, `down_proj` is (experts, width, hidden).
In MXFP4 each is `…_blocks` (experts, outputs, groups, 16) of two 4-bit floats a byte and `…_scales` (experts, outputs,
groups) of exponents (transformers, integrations/mxfp4.py). Biases are (experts, outputs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from control.errors import ModelFilesError
from worker.weights.checkpoint import Checkpoint, Ranges
from worker.weights.formats import StoredTensor
from worker.weights.schemes import E2M1, MXFP4_GROUP
from worker.weights.stored_matrix import StoredMatrix

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_NO_SCALE = 255
"""The exponent that stands for NaN."""


class StoredTogether(Checkpoint):
    """`read` of an expert's matrix gives an array (outputs, inputs), or of MXFP4 a `StoredMatrix`."""

    @property
    def borders(self) -> tuple[int, ...]:
        """The size of MXFP4's groups, which other weights may be cut at as well."""
        return (MXFP4_GROUP,)

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Any:
        """As in a plain checkpoint, with `…experts.3.up_proj.weight` and `.bias` for the parts of an expert."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return super().read(name, dim, ranges)
        experts = match[1]
        number = int(match[2])
        part = match[3]
        leaf = match[4]
        rows = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[part]
        stem = f"{experts}.{'down' if part == 'down' else 'gate_up'}_proj"
        [(start, stop)] = ranges or [(None, None)]
        cut = slice(start, stop)
        if leaf == "bias":
            return self._of(f"{stem}_bias", number)[rows][cut]
        if f"{stem}_blocks" in self:
            return self._mxfp4(stem, number, rows, cut, dim)
        matrix = self._of(stem, number).T[rows]
        return matrix[:, cut] if dim == 1 else matrix[cut]

    def _mxfp4(self, stem: str, number: int, rows: slice, cut: slice, dim: int | None) -> StoredMatrix:
        codes = self._of(f"{stem}_blocks", number)[rows]
        scales = self._of(f"{stem}_scales", number)[rows]
        if dim == 1 and cut.start is not None:
            if cut.start % MXFP4_GROUP or cut.stop % MXFP4_GROUP:
                raise ModelFilesError(f"{stem}_blocks: inputs {cut.start} to {cut.stop} cut a group. Use --tp 1.")
            groups = slice(cut.start // MXFP4_GROUP, cut.stop // MXFP4_GROUP)
            codes = codes[:, groups]
            scales = scales[:, groups]
        else:
            codes = codes[cut]
            scales = scales[cut]
        if bool((scales == _NO_SCALE).any()):
            raise ModelFilesError(f"{stem}_scales holds NaN (expert {number}). Download the checkpoint again.")
        return StoredMatrix(E2M1, codes.reshape(codes.shape[0], -1), np.ascontiguousarray(scales), None, MXFP4_GROUP)

    def _of(self, name: str, number: int) -> NDArray[Any]:
        return one_of(super().read(name), name, number)


class StoredAbove(Checkpoint):
    """The first of two tensors (experts, 2 · width, hidden) has the outputs of gate before those of up, the second is
    (experts, hidden, width). Experts that are stored one by one are read so."""

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        stored: tuple[str, str],
        hidden: int | None = None,
        inputs_first: bool = False,
    ) -> None:
        """`stored`: the names of the two tensors within the module of the experts and of their router. `hidden`: the
        size of hidden states, where inputs may come before outputs; `inputs_first`: they do."""
        super().__init__(tensors)
        self._stored = stored
        self._hidden = hidden
        self._inputs_first = inputs_first

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> NDArray[Any]:
        """As in a plain checkpoint, with `…experts.3.up_proj.weight` for the parts of an expert."""
        match = _EXPERT.fullmatch(name)
        if match is None or name in self:
            return super().read(name, dim, ranges)
        part = match[3]
        stem = match[1].removesuffix("experts") + self._stored[match[3] == "down"]
        matrix = one_of(super().read(stem), stem, int(match[2]))
        if self._inputs_first or self._hidden not in (None, matrix.shape[0 if part == "down" else 1]):
            matrix = matrix.T
        if part != "down":
            gate, up = np.array_split(matrix, 2)
            matrix = gate if part == "gate" else up
        [(start, stop)] = ranges or [(None, None)]
        return matrix[:, start:stop] if dim == 1 else matrix[start:stop]


def one_of(stored: NDArray[Any], name: str, number: int) -> NDArray[Any]:
    """The tensor of expert `number` among those of all. Raises ModelFilesError where it has none."""
    if number >= stored.shape[0]:
        raise ModelFilesError(f"Tensor {name} of shape {list(stored.shape)} has no expert {number}.")
    return stored[number]
