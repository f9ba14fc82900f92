"""Formats of stored weights: blocks of ggml's formats, the types of tensors in GGUF and safetensors files, and a
tensor's place in its file; no torch.

The layouts of blocks are those of ggml's `block_q…` structs (github.com/ggml-org/ggml, src/ggml-common.h), the numbers
of types those of include/ggml.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

from control.errors import ModelFilesError


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One format. `ggml_type` is its number in a GGUF file, `weights` and `bytes` are those of one block."""

    name: str
    ggml_type: int
    weights: int
    bytes: int

    def row_bytes(self, inputs: int) -> int:
        """Bytes of one output's weights; `inputs` is a multiple of `weights`."""
        return inputs // self.weights * self.bytes


BLOCK_FORMATS: dict[str, BlockFormat] = {
    name: BlockFormat(name, number, weights, size)
    for name, number, weights, size in (
        ("q4_0", 2, 32, 18),
        ("q4_1", 3, 32, 20),
        ("q5_0", 6, 32, 22),
        ("q5_1", 7, 32, 24),
        ("q8_0", 8, 32, 34),
        ("q2_k", 10, 256, 84),
        ("q3_k", 11, 256, 110),
        ("q4_k", 12, 256, 144),
        ("q5_k", 13, 256, 176),
        ("q6_k", 14, 256, 210),
    )
}
MXFP4 = BlockFormat("mxfp4", 39, 32, 17)
"""Four bits (E2M1) and a power of two by block."""
READ_FORMATS: dict[str, BlockFormat] = {
    MXFP4.name: MXFP4,
    "iq4_nl": BlockFormat("iq4_nl", 20, 32, 18),
    "iq4_xs": BlockFormat("iq4_xs", 23, 256, 136),
    "iq3_s": BlockFormat("iq3_s", 21, 256, 110),
    "tq2_0": BlockFormat("tq2_0", 35, 256, 66),
}
"""Formats that files have and that no quantiser here makes."""
SMALLER: dict[str, str] = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""Formats with blocks of 256 → those with blocks of 32 that llama.cpp's quantiser takes where 256 does not divide a
row. For Q2_K and Q3_K that is IQ4_NL there."""

FORMATS: dict[str, BlockFormat] = {**BLOCK_FORMATS, **READ_FORMATS}
"""All formats of blocks by name."""

BY_GGML_TYPE: dict[int, BlockFormat] = {block_format.ggml_type: block_format for block_format in FORMATS.values()}


def format_for(name: str, inputs: int) -> BlockFormat | None:
    """The format `name`, or its smaller one where its blocks don't divide `inputs`; None where neither does."""
    for format_name in (name, SMALLER.get(name, name)):
        if inputs % BLOCK_FORMATS[format_name].weights == 0:
            return BLOCK_FORMATS[format_name]
    return None


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
    **{
        number: TensorType(block_format.name, block_format.weights, block_format.bytes, block_format)
        for number, block_format in BY_GGML_TYPE.items()
    },
}
"""The types of GGUF files that are read, by their numbers."""

SAFETENSORS_TYPES: dict[str, TensorType] = {
    "F4": TensorType("F4", 2, 1),
    **{
        name: TensorType(name, 1, size)
        for size, names in {
            1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
            2: ("U16", "I16", "F16", "BF16"),
            4: ("U32", "I32", "F32"),
            8: ("U64", "I64", "F64", "C64"),
        }.items()
        for name in names
    },
}
"""The types of safetensors files."""

REFUSED_TYPES: dict[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    40: "NVFP4",
}
"""Names of the other types, for messages."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's place in a file. `shape` is torch's: rows first. `start` counts from the file's beginning."""

    path: Path
    type: TensorType
    shape: tuple[int, ...]
    start: int
    bytes: int


def check_apart(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Raise ModelFilesError where two tensors of a file share a byte."""
    end = 0
    before = ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if tensor.start < end:
            raise ModelFilesError(f"{path}: the tensors {before} and {name} overlap at byte {tensor.start}.")
        end = tensor.start + tensor.bytes
        before = name
