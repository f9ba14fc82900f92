"""A model's matrices into blocks while it is loaded: each rank quantises the part that it keeps."""

from __future__ import annotations

from collections import defaultdict

import structlog
from torch import Tensor

from control.quantization import BLOCK_QUANTS
from worker.formats.blocks import BLOCK_FORMATS, SMALLER, format_for
from worker.models.layers.blocks import Blocks, Weights
from worker.native.library import Threads
from worker.native.quantize import quantize

log = structlog.get_logger()


class Quantizer:
    """Of one load with `--quant`. Blocks of 32 take the place of those of 256 that don't divide a matrix's inputs; a
    matrix that 32 does not divide either stays in 16 bits."""

    def __init__(self, quant: str, threads: Threads) -> None:
        self._quant, self._format, self._threads = quant, BLOCK_QUANTS[quant], threads
        self._others: defaultdict[str, list[str]] = defaultdict(list)
        """Names of the matrices that are kept otherwise than asked for, by how."""

    @property
    def borders(self) -> tuple[int, ...]:
        """Weights of a block, and of the block that may take its place."""
        names = (self._format, SMALLER.get(self._format, self._format))
        return tuple(BLOCK_FORMATS[name].weights for name in names)

    def blocks(self, name: str, weights: Weights) -> Weights:
        """`weights` (outputs, inputs) in blocks; those that are in blocks already stay what they are. Raises
        ModelFilesError naming a tensor with NaN or infinity."""
        if not isinstance(weights, Tensor):
            return weights
        chosen = format_for(self._format, weights.shape[1])
        if chosen is None or chosen.name != self._format:
            self._others["16 bits" if chosen is None else chosen.name].append(name)
        return weights if chosen is None else Blocks(chosen, quantize(weights, chosen, self._threads, f"Tensor {name}"))

    def report(self) -> None:
        """Log what is kept otherwise than asked for."""
        if self._quant != self._format.replace("_k", "k"):
            log.info("a format for activations is replaced", quant=self._quant, kept_as=self._format, action="quantize")
        for kept_as, names in self._others.items():
            log.warning(
                "matrices that blocks do not divide",
                quant=self._quant,
                kept_as=kept_as,
                matrices=len(names),
                first=names[0],
                action="quantize",
            )
