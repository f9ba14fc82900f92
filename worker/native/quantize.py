"""Float weights into blocks of the formats that llama.cpp reads."""

from __future__ import annotations

import torch
from torch import Tensor

from control.errors import ModelFilesError
from worker.formats.blocks import BlockFormat
from worker.native.library import Threads

CHUNK = 1024
"""Outputs that are quantised at once, so that no float32 copy of the whole is made."""

UNKNOWN_FORMAT = -2
"""Result of furrow_quantize for a format that it does not know; -1 is success."""


def quantize(weights: Tensor, format: BlockFormat, threads: Threads, name: str = "A tensor") -> Tensor:
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
    threads.number(format)
    data = torch.empty(outputs, format.row_bytes(inputs), dtype=torch.uint8)
    for start in range(0, outputs, CHUNK):
        rows = weights[start : start + CHUNK].float().contiguous()
        place = data[start : start + CHUNK]
        bad: int = threads.library.furrow_quantize(
            threads.address, format.ggml_type, rows.data_ptr(), rows.shape[0], inputs, place.data_ptr()
        )
        if bad >= 0:
            raise ModelFilesError(f"{name} has NaN or infinity in row {start + bad}. Download the checkpoint again.")
        if bad == UNKNOWN_FORMAT:
            raise ValueError(f"no quantiser for {format.name}")
    return data
