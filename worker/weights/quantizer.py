"""Float weights into blocks of the formats that llama.cpp reads, while a model is loaded."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from control.errors import ModelFilesError
from control.quantization import BLOCK_QUANTS
from worker.native.library import Threads
from worker.weights.formats import BLOCK_FORMATS, SMALLER, BlockFormat, format_for
from worker.weights.stored_matrix import StoredMatrix, Weights

log = structlog.get_logger()

CHUNK = 1024
"""Outputs that are quantised at once, so that no float32 copy of the whole is made."""

UNKNOWN_FORMAT = -2
"""Result of furrow_quantize for a format that it does not know; -1 is success."""


def quantize(weights: NDArray[Any], format: BlockFormat, threads: Threads, name: str = "A tensor") -> NDArray[np.uint8]:
    """The blocks (outputs, row bytes) of `weights` (outputs, inputs), which are of any float type.

    The scales of a block are those with the least squared error that a bounded search finds. The bytes do not depend
    on the number of threads. Raises ValueError where blocks do not divide the inputs, and ModelFilesError naming the
    tensor `name` for a weight that is NaN or infinite.
    """
    outputs, inputs = weights.shape
    if inputs % format.weights:
        raise ValueError(
            f"{inputs} inputs are no multiple of {format.weights}, the weights of a block of {format.name}"
        )
    threads.number(format.name)
    data = np.empty((outputs, format.row_bytes(inputs)), np.uint8)
    for start in range(0, outputs, CHUNK):
        rows = np.ascontiguousarray(weights[start : start + CHUNK], np.float32)
        place = data[start : start + CHUNK]
        bad: int = threads.library.furrow_quantize(
            threads.address, format.ggml_type, rows.ctypes.data, rows.shape[0], inputs, place.ctypes.data
        )
        if bad >= 0:
            raise ModelFilesError(f"{name} has NaN or infinity in row {start + bad}. Download the checkpoint again.")
        if bad == UNKNOWN_FORMAT:
            raise ValueError(f"no quantiser for {format.name}")
    return data


class Quantizer:
    """Of one load with `--quant`. Blocks of 32 take the place of those of 256 that don't divide a matrix's inputs; a
    matrix that 32 does not divide either stays in 16 bits."""

    def __init__(self, quant: str, threads: Threads) -> None:
        self._quant = quant
        self._format = BLOCK_QUANTS[quant]
        self._threads = threads
        self._names_by_format: defaultdict[str, list[str]] = defaultdict(list)
        """Names of the matrices that are kept otherwise than asked for, by how."""

    @property
    def borders(self) -> tuple[int, ...]:
        """Weights of a block, and of the block that may take its place."""
        names = (self._format, SMALLER.get(self._format, self._format))
        return tuple(BLOCK_FORMATS[name].weights for name in names)

    def blocks(self, name: str, weights: Weights) -> Weights:
        """`weights` (outputs, inputs) in blocks; those that are in blocks already stay what they are. Raises
        ModelFilesError naming a tensor with NaN or infinity."""
        if isinstance(weights, StoredMatrix):
            return weights
        block_format = format_for(self._format, weights.shape[1])
        if block_format is None or block_format.name != self._format:
            self._names_by_format["16 bits" if block_format is None else block_format.name].append(name)
        return (
            weights
            if block_format is None
            else StoredMatrix(block_format.name, self._quantized(name, weights, block_format))
        )

    def _quantized(self, name: str, weights: NDArray[Any], format: BlockFormat) -> NDArray[np.uint8]:
        return quantize(weights, format, self._threads, f"Tensor {name}")

    def report(self) -> None:
        """Log the matrices that are stored in another type than the requested one."""
        if self._quant != self._format.replace("_k", "k"):
            log.info("a format for activations is replaced", quant=self._quant, kept_as=self._format, action="quantize")
        for kept_as, names in self._names_by_format.items():
            log.warning(
                "matrices that blocks do not divide",
                quant=self._quant,
                kept_as=kept_as,
                matrices=len(names),
                first=names[0],
                action="quantize",
            )
