"""The kinds of packed weights that a model's ranks will have, from file headers alone."""

from __future__ import annotations

from control.quantization import BLOCK_QUANTS
from worker.native.library import KINDS
from worker.repository.files import ModelFiles
from worker.weights.formats import SMALLER
from worker.weights.safetensors_header import text_tensors
from worker.weights.schemes import scheme_of

STORED = {"F16": "float16", "BF16": "bfloat16", "f16": "float16", "bf16": "bfloat16"}
"""Types of safetensors and of GGUF whose numbers stay what they are."""


def kinds_of(files: ModelFiles, quant: str | None, dequantize: bool = False, dtype: str = "auto") -> frozenset[str]:
    """Names of native/library.py. May have more than are needed; a rank that meets another one loads again with all.
    Raises ModelFilesError."""
    kinds: set[str] = {dtype} & set(STORED.values())
    if quant in BLOCK_QUANTS:
        format = BLOCK_QUANTS[quant]
        kinds |= {format, SMALLER.get(format, format)}
    elif quant == "int8":
        kinds.add("int8")
    if quant not in (None, "int8"):
        kinds.add("float16")
    if files.gguf is not None:
        types = {tensor.type.name for tensor in files.tensors.values()}
        blocks = set[str]() if dequantize else types & set(KINDS)
    else:
        scheme = scheme_of(files.config)
        types = {tensor.type.name for tensor in text_tensors(files.tensors).values()}
        blocks = set[str]() if scheme is None else set(scheme.kinds)
    # Of a mixture the router stays in 16 bits beside int8.
    if quant != "int8" or "num_experts_per_tok" in files.config or blocks:
        kinds |= {STORED[tensor_type] for tensor_type in types if tensor_type in STORED}
    if "num_experts_per_tok" in files.config:
        kinds.add("bfloat16")
    return frozenset(kinds | blocks)
