"""Kinds of weights: what each engine calls them, and how much memory a value takes."""

from __future__ import annotations

from ops.bench.peers.engine import Unavailable
from ops.harness.models import BLOCKS

FILES = {"q4_k_m": 0.655}
"""Mixtures of formats that only a GGUF file has, which Furrow and llama.cpp both read: bytes of a value on average, in
the shape qwen3-0.6b."""

BYTES = (
    {"f64": 8.0, "f32": 4.0, "f16": 2.0, "bf16": 2.0, "int8": 1.0}
    | {quant: block_format.bytes / block_format.weights for quant, block_format in BLOCKS.items()}
    | FILES
)
"""Of one value of a matrix, scales included where they are stored beside it."""

_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16"}
_QUANTS = {"f16": "f16", "int8": "int8", **{quant: quant for quant in BLOCKS}}
_KV_OF_LLAMA_CPP = 2.0
"""It keeps keys and values as float16 whatever the weights are."""


def of_furrow(weights: str, device: str) -> tuple[str, str | None]:
    """The values of --dtype and --quant. Raises Unavailable for weights that Furrow has no name for."""
    if weights in _DTYPES:
        return _DTYPES[weights], None
    if weights == "f16" and device != "cpu":
        return "float16", None
    if weights in FILES and device == "cpu":
        return "float32", None
    if weights in _QUANTS:
        return ("float32" if device == "cpu" else "bfloat16"), _QUANTS[weights]
    raise Unavailable(
        f"Furrow knows no {weights} weights; use {', '.join([*_DTYPES, *_QUANTS])}, and on CPUs {', '.join(FILES)}"
    )


def of_transformers(weights: str) -> str:
    """The value of dtype. Raises Unavailable for quantised weights."""
    dtypes = {**_DTYPES, "f16": "float16"}
    if weights not in dtypes:
        raise Unavailable(f"transformers is measured with {', '.join(dtypes)} only, not {weights}")
    return dtypes[weights]


def kv_bytes(engine: str, weights: str, device: str) -> float:
    """Bytes of one cached value."""
    if engine.startswith("llama"):
        return _KV_OF_LLAMA_CPP
    if engine.startswith("furrow") and weights in _QUANTS | FILES:
        return 4.0 if device == "cpu" else 2.0
    return BYTES[weights]
