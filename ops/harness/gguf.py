"""Writes a random Qwen3 model, dense or of experts, as a GGUF file for llama.cpp; blocks but Q8_0 need C++.

The format is GGUF version 3 (github.com/ggml-org/ggml/blob/master/docs/gguf.md); names and keys are llama.cpp's for the
architectures "qwen3" and "qwen3moe". The vocabulary is the alphabet, as a SentencePiece one: a character of it is one
token.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from control.errors import SettingsError
from ops.harness import alphabet
from ops.harness.models import BLOCKS
from worker.families.gguf import EXPERT_LAYER_NAMES, OUTER_NAMES
from worker.weights.formats import BlockFormat
from worker.weights.safetensors_header import read_headers

Floats = NDArray[np.float32]

_ALIGNMENT = 32
_BLOCK = 32
"""Values that share a scale in the quantised types."""
# Kinds of tokens.
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3

NAMES = OUTER_NAMES | EXPERT_LAYER_NAMES
ARCHITECTURES = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}


class Tensor(NamedTuple):
    """A tensor of the file: the matrices of a layer's experts one after the other, or one array."""

    name: str
    shape: tuple[int, ...]
    parts: list[NDArray[Any]]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def convert(folder: Path, file: Path, weights: str) -> Path:
    """Write the model in `folder` to `file`, its matrices as `weights` (a key of TYPES or MIXTURES). Returns `file`.

    Raises SettingsError for another architecture, and where rows can't be cut into blocks.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        names = " and ".join(ARCHITECTURES)
        raise SettingsError(f"{folder}: only {names} are written as GGUF, not {config['model_type']}")
    tensors = _tensors(folder)
    kinds = [_type_of(tensor, weights, config["num_hidden_layers"]) for tensor in tensors]
    for tensor, kind in zip(tensors, kinds, strict=True):
        if tensor.shape[-1] % TYPES[kind].values:
            raise SettingsError(
                f"{tensor.name} has rows of {tensor.shape[-1]}: {kind} needs a multiple of {TYPES[kind].values}"
            )
    unfinished = file.with_suffix(".part")
    with unfinished.open("wb") as out:
        fields = metadata(config)
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        for key, value in fields.items():
            out.write(encode_text(key) + encode_value(value))
        offset = 0
        for tensor, kind in zip(tensors, kinds, strict=True):
            rank = len(tensor.shape)
            out.write(encode_text(tensor.name) + struct.pack(f"<I{rank}Q", rank, *tensor.shape[::-1]))
            out.write(struct.pack("<IQ", TYPES[kind].number, offset))
            size = tensor.size // TYPES[kind].values * TYPES[kind].bytes
            offset += size + -size % _ALIGNMENT
        for tensor, kind in zip(tensors, kinds, strict=True):
            _pad(out)
            for array in tensor.parts:
                for part in np.array_split(
                    array, max(1, array.size >> 24)
                ):  # a converted copy of a whole would be large
                    out.write(TYPES[kind].convert(_floats(part)).tobytes())
        _pad(out)
    return unfinished.rename(file)


def _type_of(tensor: Tensor, weights: str, depth: int) -> str:
    """A key of TYPES. llama.cpp reads routers in float32 only."""
    if len(tensor.shape) == 1 or "ffn_gate_inp" in tensor.name:
        return "f32"
    return MIXTURES[weights](tensor.name, depth) if weights in MIXTURES else weights


def _q4_k_m(name: str, depth: int) -> str:
    """As llama.cpp's quantiser chooses for Q4_K_M: Q6_K for the head, and for values and `down` of the first and last
    eighth of the layers and of every third one between."""
    if name in ("token_embd.weight", "output.weight"):
        return "q6k"
    index = int(name.split(".")[1])
    part = name.split(".")[2]
    eighth = depth // 8
    large = index < eighth or index >= 7 * depth // 8 or (index - eighth) % 3 == 2
    return "q6k" if large and part in ("attn_v", "ffn_down") else "q4k"


MIXTURES: dict[str, Callable[[str, int], str]] = {"q4_k_m": _q4_k_m}
"""Files of several types: (name of a tensor, layers of the model) → a key of TYPES."""


def _tensors(folder: Path) -> list[Tensor]:
    """In the order in which their names first occur."""
    arrays: dict[str, dict[int, NDArray[Any]]] = {}
    for name, array in read_weights(folder):
        expert = re.search(r"\.experts\.(\d+)\.", name)
        whole = name if expert is None else name.replace(expert[0], ".experts.")
        arrays.setdefault(gguf_name(whole), {})[-1 if expert is None else int(expert[1])] = array
    tensors: list[Tensor] = []
    for name, several in arrays.items():
        parts = [several[index] for index in sorted(several)]
        shape = parts[0].shape if -1 in several else (len(parts), *parts[0].shape)
        tensors.append(Tensor(name, shape, parts))
    return tensors


def gguf_name(name: str) -> str:
    """llama.cpp's name of a parameter, without an expert's number. Raises KeyError for one that Qwen3 does not have."""
    stem, _, leaf = name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{NAMES[rest]}.{leaf}"
    return f"{NAMES[stem]}.{leaf}"


def metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The metadata that llama.cpp needs, by its keys."""
    size = config["vocab_size"]
    name = ARCHITECTURES[config["model_type"]]
    rope = config.get("rope_parameters") or config
    experts = {}
    if name == "qwen3moe":
        experts = {
            "qwen3moe.expert_count": config.get("num_experts")
            or config["num_local_experts"],  # transformers renames it
            "qwen3moe.expert_used_count": config["num_experts_per_tok"],
            "qwen3moe.expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return experts | {
        "general.architecture": name,
        "general.name": "random",
        f"{name}.block_count": config["num_hidden_layers"],
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.feed_forward_length": config["intermediate_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config["head_dim"],
        f"{name}.attention.value_length": config["head_dim"],
        f"{name}.attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        f"{name}.rope.freq_base": float(rope["rope_theta"]),
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(alphabet.characters(size)),
        "tokenizer.ggml.scores": [0.0] * size,
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL] + [_NORMAL] * (size - len(alphabet.SPECIAL)),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": alphabet.BOS,
        "tokenizer.ggml.eos_token_id": alphabet.EOS,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
    }


def read_weights(folder: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values of each parameter, mapped, not read: float32, or bfloat16 as uint16."""
    for name, header in read_headers(sorted(folder.glob("*.safetensors"))).items():
        dtype = {"F32": np.float32, "BF16": np.uint16}[header.type.name]
        yield name, np.memmap(header.path, dtype, "r", header.start, header.shape)


def _floats(values: NDArray[Any]) -> Floats:
    if values.dtype == np.float32:
        return np.asarray(values)
    return (values.astype(np.uint32) << 16).view(np.float32)


# --- types of weights -------------------------------------------------------------------------------------------------


class Type(NamedTuple):
    """`number` is its name in the file; `values` are stored together in so many `bytes`."""

    number: int
    convert: Callable[[Floats], NDArray[Any]]
    values: int
    bytes: int


def _f32(values: Floats) -> NDArray[Any]:
    return values


def _f16(values: Floats) -> NDArray[Any]:
    return values.astype(np.float16)


def _bf16(values: Floats) -> NDArray[Any]:
    """The upper half of each value, rounded to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _q8_0(values: Floats) -> NDArray[Any]:
    """Blocks of 32: a float16 scale, then the values as int8."""
    blocks = values.reshape(-1, _BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    whole = np.round(blocks * inverse).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), whole.view(np.uint8)], axis=1)


def _packed(format: BlockFormat) -> Callable[[Floats], NDArray[Any]]:
    """Furrow's own quantiser: no error is larger than that of llama.cpp's (tests/unit/worker/native)."""

    def convert(values: Floats) -> NDArray[Any]:
        from worker.native.library import threads_here
        from worker.weights.quantizer import quantize

        threads = threads_here()
        if threads is None:
            raise SettingsError(f"{format.name} is quantised in C++, which can't be compiled here")
        return quantize(values, format, threads)

    return convert


TYPES = {
    **{
        quant: Type(block_format.ggml_type, _packed(block_format), block_format.weights, block_format.bytes)
        for quant, block_format in BLOCKS.items()
    },
    "f32": Type(0, _f32, 1, 4),
    "f16": Type(1, _f16, 1, 2),
    "bf16": Type(30, _bf16, 1, 2),
    "q8_0": Type(8, _q8_0, _BLOCK, 34),
}


# --- encoding ---------------------------------------------------------------------------------------------------------


def encode_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def encode_value(value: Any) -> bytes:
    """A value with its type before it; numbers are uint32, float32 or, in lists, int32."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + encode_text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(encode_text, value))
        case [float(), *_]:
            return struct.pack("<IIQ", 9, 6, len(value)) + np.asarray(value, np.float32).tobytes()
        case [int(), *_]:
            return struct.pack("<IIQ", 9, 5, len(value)) + np.asarray(value, np.int32).tobytes()
        case _:
            raise TypeError(f"no GGUF type for {value!r}")


def _pad(out: BinaryIO) -> None:
    out.write(b"\0" * (-out.tell() % _ALIGNMENT))
