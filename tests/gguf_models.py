"""Writes GGUF files for tests: from any fields and tensors, or a random model with the numbers that its weights are."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from ops.harness.gguf import TYPES, encode_text, encode_value
from tests import hybrid_layout, mamba_layout, models
from tests.experts_layout import (
    experts_apart,
    experts_together,
    fused,
    heads_apart,
    heads_together,
    inputs_first,
    inputs_last,
    stacked_apart,
    stacked_together,
)
from worker.weights.dequantize import dequantize
from worker.weights.formats import FORMATS
from worker.weights.stored_matrix import StoredMatrix

Floats = NDArray[np.float32]

HALVES = {
    "q4_0": [0],
    "q5_0": [0],
    "q8_0": [0],
    "q4_1": [0, 2],
    "q5_1": [0, 2],
    "q2_k": [80, 82],
    "q3_k": [108],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
    "iq4_nl": [0],
    "iq4_xs": [0],
    "iq3_s": [0],
    "tq2_0": [64],
}
"""Places of the 16-bit numbers in a block."""
SCALE = {
    "q4_0": 30,
    "q5_0": 60,
    "q8_0": 500,
    "q2_k": 60,
    "q3_k": 400,
    "q4_k": 1000,
    "q5_k": 2000,
    "q6_k": 6000,
    "iq4_nl": 500,
    "iq4_xs": 10000,
    "iq3_s": 1000,
    "tq2_0": 10,
}

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "model.embedding_norm.weight": "token_embd_norm.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "model.final_layernorm.weight": "output_norm.weight",
    "model.final_layernorm.bias": "output_norm.bias",
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
HUNYUAN_PARTS = PARTS | {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
GPT_OSS_PARTS = PARTS | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
PARTS_BY_FAMILY = {"gpt_oss": GPT_OSS_PARTS, "hunyuan_v1_dense": HUNYUAN_PARTS}
PARTS_BY_FAMILY |= dict.fromkeys(("gemma2", "gemma3_text", "olmo2", "exaone4"), GEMMA_PARTS)
PARTS_BY_FAMILY["seed_oss"] = PARTS | {"post_attention_layernorm": "post_attention_norm"}
PARTS_BY_FAMILY["starcoder2"] = PARTS | {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
PARTS_BY_FAMILY["phi3"] = PARTS | {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
PARTS_BY_FAMILY["glm4"] = PARTS | {
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
ROUTED_PARTS = PARTS | {
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
MIXTRAL_PARTS = PARTS | {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
}
PARTS_BY_FAMILY |= dict.fromkeys(("dots1", "exaone_moe", "ernie4_5_moe"), ROUTED_PARTS)
PARTS_BY_FAMILY |= dict.fromkeys(("mixtral", "minimax_m2"), MIXTRAL_PARTS)
PARTS_BY_FAMILY["apertus"] = PARTS | {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"}
LFM2_PARTS = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
}
PARTS_BY_FAMILY |= dict.fromkeys(("lfm2", "lfm2_moe"), LFM2_PARTS)
PARTS_BY_FAMILY["phi"] = PARTS | {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
PARTS_BY_FAMILY["glm4_moe"] = ROUTED_PARTS | {"post_attention_layernorm": "post_attention_norm"}
PARTS_BY_FAMILY["granitemoe"] = PARTS | {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.experts.gate_proj": "ffn_gate_exps",
    "block_sparse_moe.experts.up_proj": "ffn_up_exps",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
}
PARTS_BY_FAMILY["qwen2_moe"] = PARTS | {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
PARTS_BY_FAMILY["hunyuan_v1_moe"] = HUNYUAN_PARTS | {
    "mlp.gate.wg": "ffn_gate_inp",
    "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp",
    "mlp.shared_mlp.down_proj": "ffn_down_shexp",
}
PARTS_BY_FAMILY |= dict.fromkeys(
    ("deepseek_v3", "glm4_moe_lite"),
    ROUTED_PARTS
    | {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
    },
)
PERMUTED = ("llama", "arcee", "smollm3", "granite", "granitemoe", "granitemoehybrid", "ministral3", "mixtral")
"""Families whose queries and keys lie in the order of adjacent pairs."""
MAMBAS = tuple(mamba_layout.ARCHITECTURES)
FEED_FORWARD = {f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
PARTS_BY_FAMILY["falcon_h1"] = PARTS | mamba_layout.PARTS | FEED_FORWARD
PARTS_BY_FAMILY["nemotron_h"] = mamba_layout.NEMOTRON_PARTS
PARTS_BY_FAMILY["granitemoehybrid"] = PARTS_BY_FAMILY["granitemoe"] | {
    **mamba_layout.PARTS,
    "shared_mlp.gate": "ffn_gate_shexp",
    "shared_mlp.up": "ffn_up_shexp",
    "shared_mlp.output_linear": "ffn_down_shexp",
}
PARTS_BY_FAMILY["gemma4_text"] = GEMMA_PARTS | {
    "experts.gate_proj": "ffn_gate_exps",
    "experts.up_proj": "ffn_up_exps",
    "experts.down_proj": "ffn_down_exps",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
PARTS_BY_FAMILY["llama4_text"] = {
    **PARTS,
    **FEED_FORWARD,
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{f"feed_forward.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}
OFFSET_NORMS = ("gemma", "gemma2", "gemma3_text")
"""Families whose norms lie with one added."""
PARTS_BY_FAMILY |= dict.fromkeys(HYBRIDS, PARTS | hybrid_layout.PARTS)
PARTS_BY_FAMILY["qwen3_next"] = PARTS | hybrid_layout.QWEN3_NEXT_PARTS
WHOLE = {
    "self_attn.sinks": "attn_sinks.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **hybrid_layout.WHOLE,
    **mamba_layout.WHOLE,
}
WHOLE |= dict.fromkeys(
    (
        "mlp.gate.e_score_correction_bias",
        "mlp.e_score_correction_bias",
        "mlp.moe_statics.e_score_correction_bias",
        "block_sparse_moe.e_score_correction_bias",
        "feed_forward.expert_bias",
    ),
    "exp_probs_b.bias",
)
ARCHITECTURES = {
    "gpt_oss": "gpt-oss",
    "qwen3_moe": "qwen3moe",
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "arcee": "arcee",
    "ernie4_5": "ernie4_5",
    "hunyuan_v1_dense": "hunyuan-dense",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "granite": "granite",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "glm4": "glm4",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "apertus": "apertus",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "phi": "phi2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "granitemoe": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "llama4_text": "llama4",
    "gemma4_text": "gemma4",
    **mamba_layout.ARCHITECTURES,
}


@dataclass(frozen=True)
class Stored:
    """A tensor as a file has it: ggml's number of its type, rows first, and its bytes."""

    type: int
    shape: tuple[int, ...]
    data: bytes


WRITTEN = ("f32", "f16", "bf16", "q8_0")
"""Types that numpy writes and reads. Blocks of others are random, so that no quantiser of Furrow is needed."""


def write(path: Path, fields: dict[str, Any], tensors: dict[str, Stored], alignment: int = 32) -> Path:
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
    for key, value in fields.items():
        out += encode_text(key) + (value if isinstance(value, bytes) else encode_value(value))
    offset = 0
    for name, one in tensors.items():
        out += encode_text(name) + struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape[::-1])
        out += struct.pack("<IQ", one.type, offset)
        offset += len(one.data) + -len(one.data) % alignment
    for one in tensors.values():
        out += bytes(-len(out) % alignment) + one.data
    path.write_bytes(out)
    return path


def stored(kind: str, values: Floats, seed: int = 0, size: float = 1.0) -> tuple[Stored, Floats]:
    """`values` as `kind`, and the numbers that it holds then; of a type that is not in WRITTEN, random blocks."""
    if kind in WRITTEN:
        data = TYPES[kind].convert(np.ascontiguousarray(values)).tobytes()
        return Stored(TYPES[kind].number, values.shape, data), _numbers(kind, data, values.shape)
    form = FORMATS[kind]
    raw = random_blocks(kind, values.shape[0] * values.shape[1] // form.weights, seed, size).reshape(
        values.shape[0], -1
    )
    numbers = dequantize(StoredMatrix(form.name, raw))
    return Stored(form.ggml_type, values.shape, raw.tobytes()), numbers


def random_blocks(kind: str, count: int, seed: int = 0, size: float = 1.0) -> NDArray[np.uint8]:
    """(count, bytes of one) with numbers about 0.1 · `size` in size."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, (count, FORMATS[kind].bytes), dtype=np.uint8)
    if kind == "mxfp4":
        raw[:, 0] = generator.integers(119, 125, count) + round(np.log2(size))
    for index, place in enumerate(HALVES.get(kind, [])):
        unit = size / SCALE.get(kind, 60) * (-4 if index and kind.endswith("_1") else 1)
        half = (generator.uniform(0.5, 1, (count, 1)) * unit).astype(np.float16)
        raw[:, place : place + 2] = half.view(np.uint8)
    return raw


def _numbers(kind: str, data: bytes, shape: tuple[int, ...]) -> Floats:
    if kind == "q8_0":
        blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        return (scale * blocks[:, 2:].view(np.int8).astype(np.float32)).reshape(shape)
    if kind == "bf16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(data, {"f32": np.float32, "f16": np.float16}[kind]).astype(np.float32).reshape(shape)


def make(
    family: str, folder: Path, kinds: list[str], seed: int = 0, size: float = 1.0, **changes: Any
) -> tuple[Path, Path]:
    """A random model as GGUF, its matrices as `kinds` in turn; and the folder of the model that has its numbers. `size`
    is that of `random_blocks`."""
    plain = models.make(family, folder, seed, **changes)
    config = json.loads((plain / "config.json").read_text())
    stored_weights = load_file(plain / "model.safetensors")
    turned = family == "llama4_text"
    stacks = turned or family == "gemma4_text"
    weights = inputs_last(stored_weights, turned) if stacks else experts_apart(stored_weights)
    weights = hybrid_layout.projections_apart(weights, config)
    if family == "granitemoehybrid":
        weights = mamba_layout.halves_apart(weights)
    if family in ("granitemoe", "granitemoehybrid"):
        shared_ones = {name: values for name, values in weights.items() if ".shared_mlp." in name}
        weights = stacked_apart({name: values for name, values in weights.items() if name not in shared_ones})
        weights |= shared_ones
    if "kv_lora_rank" in config:
        weights = heads_apart(weights, config)
    parts, numbers = dict[str, dict[int, Stored]](), dict[str, Floats]()
    for index, (name, values) in enumerate(sorted(weights.items())):
        if ".act_fn." in name:  # files have them among the metadata
            numbers[name] = values
            continue
        rows = _in_file(family, name, values, config)
        kind = (
            kinds[index % len(kinds)]
            if rows.ndim == 2 and not any(part in name for part in ("conv.conv", *mamba_layout.OF_HEADS))
            else "f32"
        )
        if ".experts." in name and values.ndim == 2:
            kind = kinds[len(name) % len(kinds)]  # one tensor has one type
        if ".shared_mlp." in name:
            kind = kinds[0]  # gate and up are one matrix
        one, held = stored(kind, rows, index, size)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        parts.setdefault(gguf_name(family, name), {})[int(expert[1]) if expert else -1] = one
        numbers[name] = np.ascontiguousarray(_as_transformers(family, name, held, config))
    numbers = inputs_first(numbers, turned) if stacks else experts_together(numbers)
    numbers = hybrid_layout.projections_together(numbers, config)
    if family in ("granitemoe", "granitemoehybrid"):
        numbers = mamba_layout.halves_together(stacked_together(numbers))
    if "kv_lora_rank" in config:
        numbers = heads_together(numbers)
    save_file(numbers, plain / "model.safetensors", {"format": "pt"})
    tensors = {name: _together(several) for name, several in parts.items()}
    tensors = fused(tensors) if family in ("qwen3_next", "gemma4_text") else tensors
    scaling = config.get("rope_parameters", {})
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = factors(scaling, config["head_dim"])
    if family == "gemma4_text":
        tensors["rope_freqs.weight"] = gemma4_factors(config)
    return write(folder / "model.gguf", metadata(family, config) | _learned(weights), tensors), plain


def _learned(weights: dict[str, Floats]) -> dict[str, list[float]]:
    """The learned numbers of apertus' activation, by layer."""
    found = dict[str, list[float]]()
    names = [name for name in weights if ".act_fn." in name]
    for name in sorted(names, key=lambda one: int(one.split(".")[2])):
        found.setdefault(f"xielu.{name.rpartition('.')[2]}", []).append(float(weights[name].reshape(())))
    return found


def _in_file(family: str, name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """The numbers of a parameter as a file has them."""
    if family in HYBRIDS:
        return hybrid_layout.to_file(name, values, config)
    if family in MAMBAS:
        values = mamba_layout.to_file(name, values, config)
    if name.endswith("conv.conv.weight"):
        return values[:, 0]
    if family in OFFSET_NORMS and "norm" in name:
        return values + 1
    return _permuted(name, values, config) if family in PERMUTED else values


def _as_transformers(family: str, name: str, held: Floats, config: dict[str, Any]) -> Floats:
    """The inverse of `_in_file`."""
    if family in HYBRIDS:
        return hybrid_layout.from_file(name, held, config)
    if family in MAMBAS:
        held = mamba_layout.from_file(name, held)
    if name.endswith("conv.conv.weight"):
        return held[:, None]
    if family in OFFSET_NORMS and "norm" in name:
        return held - 1
    return _ordered(name, held, config) if family in PERMUTED else held


def _together(several: dict[int, Stored]) -> Stored:
    """The experts of a layer as one tensor; a matrix or vector alone."""
    if list(several) == [-1]:
        return several[-1]
    ordered = [several[expert] for expert in range(len(several))]
    shape = (len(ordered), *ordered[0].shape)
    return Stored(ordered[0].type, shape, b"".join(one.data for one in ordered))


def gguf_name(family: str, name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    if rest in WHOLE:
        return f"blk.{layer}.{WHOLE[rest]}"
    stem, _, leaf = re.sub(r"\bexperts\.\d+\.", "experts.", rest).rpartition(".")
    return f"blk.{layer}.{PARTS_BY_FAMILY.get(family, PARTS)[stem]}.{leaf}"


def _heads(name: str, config: dict[str, Any]) -> int | None:
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else None


def _permuted(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """As llama.cpp's converter orders a llama's rows: a pair's two halves become neighbours."""
    if (heads := _heads(name, config)) is None:
        return values
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _ordered(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    if (heads := _heads(name, config)) is None:
        return values
    return values.reshape(heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


GEMMA4_FULL = "full_attention"


def gemma4_factors(config: dict[str, Any]) -> Stored:
    """The tensor that llama.cpp's converter writes for the layers with full attention: others' frequencies stay."""
    width = _gemma4_heads(config)["head_dim"]
    turned = int(width * config["rope_parameters"][GEMMA4_FULL]["partial_rotary_factor"] / 2)
    factors = [1.0] * turned + [1e30] * (width // 2 - turned)
    return Stored(0, (width // 2,), np.asarray(factors, np.float32).tobytes())


def _gemma4_heads(config: dict[str, Any]) -> dict[str, int]:
    """Width and number of key-value heads of the layers with full attention."""
    return next(iter(config["per_layer_config"].values()))


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    kinds, shared, inner = config["layer_types"], config["num_kv_shared_layers"], config["intermediate_size"]
    slides = [kind != GEMMA4_FULL for kind in kinds]
    full = _gemma4_heads(config)
    usual = config["num_key_value_heads"]
    return {
        "gemma4.attention.head_count_kv": [usual if one else full["num_key_value_heads"] for one in slides],
        "gemma4.attention.key_length": full["head_dim"],
        "gemma4.attention.key_length_swa": config["head_dim"],
        "gemma4.rope.dimension_count": full["head_dim"],
        "gemma4.rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
        "gemma4.attention.sliding_window": config["sliding_window"],
        "gemma4.attention.sliding_window_pattern": struct.pack(f"<IIQ{len(slides)}?", 9, 7, len(slides), *slides),
        "gemma4.attention.shared_kv_layers": shared,
        "gemma4.embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "gemma4.feed_forward_length": [inner] * (len(slides) - shared) + [2 * inner] * shared,
        "gemma4.final_logit_softcapping": float(config["final_logit_softcapping"]),
        "gemma4.expert_count": config["num_experts"],
        "gemma4.expert_used_count": config["top_k_experts"],
        "gemma4.expert_feed_forward_length": config["moe_intermediate_size"],
    }


def factors(scaling: dict[str, Any], width: int) -> Stored:
    """The tensor that llama.cpp's converter writes for a Llama 3."""
    factors: list[float] = []
    for index in range(width // 2):
        length = 2 * np.pi * scaling["rope_theta"] ** (2 * index / width)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        original = scaling["original_max_position_embeddings"]
        passage = float(original > length) if high == low else (original / length - low) / (high - low)
        smooth = min(1.0, max(0.0, passage))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return Stored(0, (width // 2,), np.asarray(factors, np.float32).tobytes())


EPSILONS = {
    "rms_norm_eps": "layer_norm_rms_epsilon",
    "layer_norm_eps": "layer_norm_epsilon",
    "norm_epsilon": "layer_norm_epsilon",
}


def metadata(family: str, config: dict[str, Any]) -> dict[str, Any]:
    name, rope = ARCHITECTURES[family], config.get("rope_parameters") or {"rope_theta": 1e4}
    rope = rope.get("full_attention", rope)
    fields: dict[str, Any] = {
        "general.architecture": name,
        f"{name}.block_count": config.get("num_hidden_layers"),
        f"{name}.context_length": config["max_position_embeddings"],
        f"{name}.embedding_length": config["hidden_size"],
        f"{name}.attention.head_count": config["num_attention_heads"],
        f"{name}.attention.head_count_kv": config["num_key_value_heads"],
        f"{name}.attention.key_length": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
        f"{name}.rope.freq_base": float(rope["rope_theta"]),
        **vocabulary(),
    }
    for field, key in EPSILONS.items():
        if field in config:
            fields[f"{name}.attention.{key}"] = float(config[field])
    if (part := rope.get("partial_rotary_factor")) is not None:
        fields[f"{name}.rope.dimension_count"] = int(fields[f"{name}.attention.key_length"] * part)
    if "intermediate_size" in config:  # else all of its layers have experts
        fields[f"{name}.feed_forward_length"] = config["intermediate_size"]
    if family in HYBRIDS:
        fields |= hybrid_layout.metadata(name, config)
    if family in MAMBAS:
        fields |= mamba_layout.metadata(family, name, config)
    if family == "llama4_text":
        fields["llama4.feed_forward_length"] = config["intermediate_size_mlp"]
        fields["llama4.expert_feed_forward_length"] = config["intermediate_size"]
        fields["llama4.expert_count"] = config["num_local_experts"]
        fields["llama4.expert_used_count"] = config["num_experts_per_tok"]
        fields["llama4.interleave_moe_layer_step"] = 2
    if family == "qwen3_moe":
        fields["qwen3moe.expert_count"] = config.get("num_experts") or config["num_local_experts"]
        fields["qwen3moe.expert_used_count"] = config["num_experts_per_tok"]
        fields["qwen3moe.expert_feed_forward_length"] = config["moe_intermediate_size"]
    if family == "gpt_oss":
        fields["gpt-oss.expert_count"] = config["num_local_experts"]
        fields["gpt-oss.expert_used_count"] = config["num_experts_per_tok"]
        fields["gpt-oss.expert_feed_forward_length"] = config["intermediate_size"]
        fields["gpt-oss.attention.sliding_window"] = config["sliding_window"]
        fields["gpt-oss.rope.scaling.type"] = "yarn"
        fields["gpt-oss.rope.scaling.factor"] = float(rope["factor"])
        fields["gpt-oss.rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields |= {f"gpt-oss.rope.scaling.yarn_{name}": float(rope[name]) for name in ("beta_fast", "beta_slow")}
    if family in ("cohere", "cohere2"):
        fields[f"{name}.logit_scale"] = float(config["logit_scale"])
    if family in ("cohere2", "gemma2", "gemma3_text", "phi3"):
        fields[f"{name}.attention.sliding_window"] = config["sliding_window"]
    if family == "gemma2":
        fields["gemma2.attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        fields["gemma2.final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if family == "exaone4":
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        fields["exaone4.attention.sliding_window"] = config["sliding_window"]
        fields["exaone4.attention.sliding_window_pattern"] = struct.pack(
            f"<IIQ{len(slides)}?", 9, 7, len(slides), *slides
        )
    if family in ("granite", "granitemoe", "granitemoehybrid"):
        fields[f"{name}.attention.scale"] = float(config["attention_multiplier"])
        fields[f"{name}.embedding_scale"] = float(config["embedding_multiplier"])
        fields[f"{name}.residual_scale"] = float(config["residual_multiplier"])
        fields[f"{name}.logit_scale"] = float(config["logits_scaling"])
    if family == "gemma4_text":
        fields |= _gemma4(config)
    if family in EXPERT_COUNTS:
        fields |= _routing(family, name, config)
    if family in ("deepseek_v3", "glm4_moe_lite"):
        fields |= _latent(name, config)
    if family in ("lfm2", "lfm2_moe"):
        convolves = [kind == "conv" for kind in config["layer_types"]]
        fields[f"{name}.attention.head_count_kv"] = [0 if one else config["num_key_value_heads"] for one in convolves]
        fields[f"{name}.attention.layer_norm_rms_epsilon"] = float(config["norm_eps"])
        fields[f"{name}.shortconv.l_cache"] = 3
    if family == "lfm2_moe":
        fields[f"{name}.leading_dense_block_count"] = config["num_dense_layers"]
    if family == "minimax_m2":
        fields[f"{name}.rope.dimension_count"] = config["rotary_dim"]
    if family == "exaone_moe":
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
        fields[f"{name}.attention.sliding_window"] = config["sliding_window"]
        fields[f"{name}.attention.sliding_window_pattern"] = struct.pack(
            f"<IIQ{len(slides)}?", 9, 7, len(slides), *slides
        )
    if family == "ministral3":
        fields[f"{name}.attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if family in ("ministral3", "deepseek_v3"):
        part = 1.0 if family == "ministral3" else 0.1
        fields |= _yarn(name, rope) | {f"{name}.rope.scaling.yarn_log_multiplier": part * rope["mscale_all_dim"]}
    return fields


EXPERT_COUNTS = {
    "deepseek_v3": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    "dots1": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    "ernie4_5_moe": ("moe_num_experts", "moe_k", "moe_num_shared_experts"),
    "exaone_moe": ("num_experts", "num_experts_per_tok", "num_shared_experts"),
    "glm4_moe": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    "glm4_moe_lite": ("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
    "granitemoe": ("num_local_experts", "num_experts_per_tok", None),
    "hunyuan_v1_moe": ("num_experts", "moe_topk", None),
    "minimax_m2": ("num_local_experts", "num_experts_per_tok", None),
    "lfm2_moe": ("num_experts", "num_experts_per_tok", None),
    "mixtral": ("num_local_experts", "num_experts_per_tok", None),
    "qwen2_moe": ("num_experts", "num_experts_per_tok", None),
}
"""By family the fields with the numbers of experts: all, those of a token, those that every token goes through."""


def _routing(family: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    # transformers may save a field under its other name.
    other = {
        "moe_num_experts": "num_experts",
        "n_routed_experts": "num_local_experts",
        "num_experts": "num_local_experts",
    }
    count, chosen, shared = (
        config.get(field or "", config.get(other.get(field or "", ""))) for field in EXPERT_COUNTS[family]
    )
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    fields: dict[str, Any] = {
        f"{name}.expert_count": count,
        f"{name}.expert_used_count": chosen[0] if isinstance(chosen, list) else chosen,
        f"{name}.expert_feed_forward_length": inner[0] if isinstance(inner, list) else inner,
        f"{name}.expert_gating_func": 2,
    }
    if shared is not None:
        fields[f"{name}.expert_shared_count"] = shared
    if "shared_expert_intermediate_size" in config:
        fields[f"{name}.expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if "n_group" in config:
        fields[f"{name}.expert_group_count"] = config["n_group"]
        fields[f"{name}.expert_group_used_count"] = config["topk_group"]
        fields[f"{name}.expert_weights_scale"] = float(config["routed_scaling_factor"])
        fields[f"{name}.expert_weights_norm"] = config["norm_topk_prob"]
    first = config.get("first_k_dense_replace", config.get("moe_layer_start_index"))
    if first is not None:
        fields[f"{name}.leading_dense_block_count"] = first
    return fields


def _latent(name: str, config: dict[str, Any]) -> dict[str, Any]:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    fields = {
        f"{name}.attention.head_count_kv": 1,
        f"{name}.attention.key_length": rank + turned,
        f"{name}.attention.value_length": rank,
        f"{name}.attention.kv_lora_rank": rank,
        f"{name}.attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        f"{name}.attention.value_length_mla": config["v_head_dim"],
        f"{name}.rope.dimension_count": turned,
    }
    if config["q_lora_rank"] is not None:
        fields[f"{name}.attention.q_lora_rank"] = config["q_lora_rank"]
    return fields


def _yarn(name: str, rope: dict[str, Any]) -> dict[str, Any]:
    scaling = f"{name}.rope.scaling"
    betas = {f"{scaling}.yarn_{beta}": float(rope[beta]) for beta in ("beta_fast", "beta_slow")}
    length = {f"{scaling}.original_context_length": rope["original_max_position_embeddings"]}
    return {f"{scaling}.type": "yarn", f"{scaling}.factor": float(rope["factor"]), **length, **betas}


def vocabulary() -> dict[str, Any]:
    """The tokenizer of `tests.models`: one token per ASCII byte."""
    names = models.bytes_to_unicode()
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*(names[byte] for byte in range(128)), "<s>", "</s>", "<pad>"],
        "tokenizer.ggml.token_type": [1] * 128 + [3] * 3,
        "tokenizer.ggml.merges": struct.pack("<IIQ", 9, 8, 0),
        "tokenizer.ggml.bos_token_id": models.BOS,
        "tokenizer.ggml.eos_token_id": models.EOS,
        "tokenizer.ggml.padding_token_id": models.PAD,
        "tokenizer.chat_template": models.TEMPLATE,
    }
