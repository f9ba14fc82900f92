"""Types of the tensors in GGUF files, by ggml's numbers (github.com/ggml-org/ggml, include/ggml.h)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from worker.formats.blocks import BY_GGML_TYPE, BlockFormat


@dataclass(frozen=True, slots=True)
class TensorType:
    """`weights` are stored in `bytes`; `blocks` is the format of a type that keeps several together."""

    name: str
    weights: int
    bytes: int
    blocks: BlockFormat | None = None

    def bytes_of(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor; its last dimension is a multiple of `weights`."""
        return prod(shape) // self.weights * self.bytes


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("f32", 1, 4),
    1: TensorType("f16", 1, 2),
    30: TensorType("bf16", 1, 2),
    **{number: TensorType(one.name, one.weights, one.bytes, one) for number, one in BY_GGML_TYPE.items()},
}
"""The types that are read."""

REFUSED_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Names of the other types, for messages."""
