"""llama.cpp's files hold the checkpoint's values: under llama.cpp's names."""

from __future__ import annotations

import json
import struct
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from control.errors import SettingsError
from ops.harness.gguf import convert, gguf_name

CONFIG = {"model_type": "qwen3", "vocab_size": 128, "num_hidden_layers": 1, "max_position_embeddings": 64}
CONFIG |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
CONFIG |= {"head_dim": 32, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5000.0}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    tensors = {
        "model.embed_tokens.weight": torch.randn(128, 64),
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 96),
        "model.layers.0.self_attn.q_norm.weight": torch.randn(32),
    }
    tensors["model.embed_tokens.weight"][:3] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tensors


def text(data: BytesIO) -> str:
    return data.read(number(data, "<Q")).decode()


def number(data: BytesIO, form: str) -> Any:
    [value] = struct.unpack(form, data.read(struct.calcsize(form)))
    return value


def value(data: BytesIO, kind: int) -> Any:
    if kind == 9:
        inner = number(data, "<I")
        return [value(data, inner) for _ in range(number(data, "<Q"))]
    return text(data) if kind == 8 else number(data, {4: "<I", 5: "<i", 6: "<f", 7: "<?"}[kind])


def read(file: Path) -> tuple[dict[str, Any], dict[str, tuple[list[int], int, bytes]]]:
    """Metadata, and of each tensor its dimensions, type and everything from its first byte on."""
    data = BytesIO(file.read_bytes())
    assert (data.read(4), number(data, "<I")) == (b"GGUF", 3)
    count, fields = number(data, "<Q"), number(data, "<Q")
    metadata = {text(data): value(data, number(data, "<I")) for _ in range(fields)}
    heads = {}
    for _ in range(count):
        name, dimensions = text(data), number(data, "<I")
        heads[name] = ([number(data, "<Q") for _ in range(dimensions)], number(data, "<I"), number(data, "<Q"))
    begin = data.tell() + -data.tell() % 32
    content = file.read_bytes()
    return metadata, {name: (size, kind, content[begin + at :]) for name, (size, kind, at) in heads.items()}


def test_float32_is_kept_bit_by_bit(checkpoint: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Values, names, reversed dimensions, the vocabulary and the numbers of the shape."""
    metadata, tensors = read(convert(tmp_path, tmp_path / "model.gguf", "f32"))
    names = {"token_embd.weight": [64, 128], "blk.0.ffn_down.weight": [96, 64], "blk.0.attn_q_norm.weight": [32]}
    assert {name: size for name, (size, _, _) in tensors.items()} == names
    for name, original in zip(names, checkpoint.values(), strict=True):
        values = np.frombuffer(tensors[name][2], np.float32, original.numel())
        assert np.array_equal(values, original.flatten().numpy())
    assert metadata["general.architecture"] == "qwen3"
    assert metadata["qwen3.rope.freq_base"] == 5000
    assert metadata["qwen3.attention.key_length"] == 32
    assert len(metadata["tokenizer.ggml.tokens"]) == len(metadata["tokenizer.ggml.scores"]) == 128
    assert metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.eos_token_id"]] == "</s>"


@pytest.mark.parametrize(("weights", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_are_rounded_as_torch_does(
    checkpoint: dict[str, torch.Tensor], tmp_path: Path, weights: str, dtype: torch.dtype
) -> None:
    """Matrices only: norms stay float32."""
    _, tensors = read(convert(tmp_path, tmp_path / "model.gguf", weights))
    original = checkpoint["model.layers.0.mlp.down_proj.weight"]
    expected = original.to(dtype).view(torch.int16).flatten().numpy()
    assert np.array_equal(np.frombuffer(tensors["blk.0.ffn_down.weight"][2], np.int16, original.numel()), expected)
    assert tensors["blk.0.attn_q_norm.weight"][1] == 0


def test_eight_bits_have_a_scale_per_block(checkpoint: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Each value comes back within half a step of its block's scale, and a block of zeros as zeros."""
    _, tensors = read(convert(tmp_path, tmp_path / "model.gguf", "q8_0"))
    blocks = np.frombuffer(tensors["token_embd.weight"][2], np.dtype([("d", "<f2"), ("q", "i1", 32)]), 128 * 64 // 32)
    found = blocks["q"] * blocks["d"].astype(np.float32)[:, None]
    original = checkpoint["model.embed_tokens.weight"].numpy().reshape(-1, 32)
    steps = np.abs(original).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(found - original) <= 0.6 * steps)
    assert not found[:6].any()


def test_what_can_not_be_written_is_refused(checkpoint: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Another architecture, and rows that blocks don't divide."""
    save_file({"model.embed_tokens.weight": torch.ones(4, 40)}, tmp_path / "model.safetensors")
    with pytest.raises(SettingsError, match=r"rows of 40: q8_0 needs a multiple of 32"):
        convert(tmp_path, tmp_path / "model.gguf", "q8_0")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    with pytest.raises(SettingsError, match="only qwen3 and qwen3_moe are written as GGUF, not llama"):
        convert(tmp_path, tmp_path / "model.gguf", "f32")


def test_experts_of_a_layer_are_one_tensor(tmp_path: Path) -> None:
    """Twelve of them in the order of their numbers, and the router in float32."""
    stem = "model.layers.0.mlp"
    tensors = {f"{stem}.experts.{index}.up_proj.weight": torch.full((2, 32), index / 1) for index in range(12)}
    save_file(tensors | {f"{stem}.gate.weight": torch.ones(12, 32)}, tmp_path / "model.safetensors")
    experts = {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts))
    metadata, found = read(convert(tmp_path, tmp_path / "model.gguf", "f16"))
    size, kind, data = found["blk.0.ffn_up_exps.weight"]
    assert (size, kind) == ([32, 2, 12], 1)
    assert np.frombuffer(data, np.float16, 12 * 64)[::64].tolist() == list(range(12))
    assert found["blk.0.ffn_gate_inp.weight"][:2] == ([32, 12], 0)
    assert metadata["qwen3moe.expert_count"] == 12
    assert metadata["qwen3moe.attention.key_length"] == 32


def test_a_mixture_has_more_bits_where_llama_cpp_gives_them(tmp_path: Path) -> None:
    """The types of Q4_K_M in nine layers, as `llama-quantize` prints them; the router of a mixture of experts and norms
    stay float32. Numbers of types are ggml's: 0 F32, 12 Q4_K, 14 Q6_K."""
    names = {"self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "mlp.down_proj": "ffn_down"}
    tensors = {f"model.layers.{i}.{name}.weight": torch.ones(1, 256) for i in range(9) for name in names}
    outer = {"model.embed_tokens.weight": torch.ones(1, 256), "model.norm.weight": torch.ones(256)}
    save_file(tensors | outer, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 9}))
    _, found = read(convert(tmp_path, tmp_path / "model.gguf", "q4_k_m"))
    types = {name: kind for name, (_, kind, _) in found.items()}
    assert (types.pop("token_embd.weight"), types.pop("output_norm.weight")) == (14, 0)
    more = {name for name, kind in types.items() if kind == 14}
    assert more == {f"blk.{i}.{name}.weight" for i in (0, 3, 6, 7, 8) for name in ("attn_v", "ffn_down")}
    assert {kind for name, kind in types.items() if name not in more} == {12}


def test_every_parameter_has_a_name() -> None:
    """As llama.cpp's architecture has them."""
    assert gguf_name("lm_head.weight") == "output.weight"
    assert gguf_name("model.norm.weight") == "output_norm.weight"
    assert gguf_name("model.layers.27.post_attention_layernorm.weight") == "blk.27.ffn_norm.weight"
