"""Metadata of gemma4 become its configuration: layers that differ, a part of frequencies, a tokenizer with merges."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from control.errors import ModelFilesError
from tests.gguf_models import Stored, make, metadata, write
from worker.repository.files import inspect
from worker.repository.gguf.configuration import configuration
from worker.repository.gguf.gate import check_tensors
from worker.repository.gguf.tokenizer import read_tokenizer
from worker.weights.gguf import GgufModel, read_model

SPACE = "▁"
SLIDES = [True, True, False, True, False]
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention" if one else "full_attention" for one in SLIDES],
    "max_position_embeddings": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "per_layer_config": {"2": {"head_dim": 32, "num_key_value_heads": 1}},
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 1e4},
    },
    "sliding_window": 12,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "final_logit_softcapping": 10.0,
    "num_experts": 0,
    "top_k_experts": 1,
    "moe_intermediate_size": 96,
}


def file(folder: Path, changes: dict[str, Any] | None = None, factors: list[float] | None = None) -> GgufModel:
    """A header without most tensors: the full layer that has keys of its own lacks values."""
    factors = [1.0] * 4 + [1e30] * 12 if factors is None else factors
    tensors = {
        "token_embd.weight": Stored(0, (131, 64), bytes(4 * 131 * 64)),
        "per_layer_token_embd.weight": Stored(0, (120, 40), bytes(4 * 120 * 40)),
        "rope_freqs.weight": Stored(0, (len(factors),), np.asarray(factors, np.float32).tobytes()),
        **{f"blk.{layer}.attn_k.weight": Stored(0, (1,), bytes(4)) for layer in range(3)},
        **{f"blk.{layer}.attn_v.weight": Stored(0, (1,), bytes(4)) for layer in range(2)},
    }
    fields = metadata("gemma4_text", CONFIG) | {"gemma4.feed_forward_length": [96, 96, 96, 192, 192]}
    return read_model(write(folder / "m.gguf", fields | (changes or {}), tensors))


def test_layers_that_differ(tmp_path: Path) -> None:
    config = configuration(file(tmp_path))
    assert config["layer_types"] == CONFIG["layer_types"] and config["head_dim"] == 16
    own = {"head_dim": 32, "num_key_value_heads": 1}
    assert config["per_layer_config"] == {"2": own, "4": own} and config["num_key_value_heads"] == 2
    assert config["attention_k_eq_v"] and config["use_double_wide_mlp"] and config["intermediate_size"] == 96
    assert config["num_kv_shared_layers"] == 2 and config["vocab_size_per_layer_input"] == 120
    assert config["rope_parameters"]["full_attention"] == {
        "rope_theta": 1e6,
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
    }
    assert not config["enable_moe_block"]
    alike = configuration(file(tmp_path, {"gemma4.feed_forward_length": 96}))
    assert not alike["use_double_wide_mlp"]


def test_double_width_beside_a_hidden_size_of_the_usual_one(tmp_path: Path) -> None:
    """Feed-forward networks as wide as the hidden size, and twice as wide in later layers, pass the gate."""
    path, _ = make("gemma4_text", tmp_path, ["f32"], hidden_size=64, intermediate_size=64)
    files = inspect(path)
    assert files.gguf is not None and files.config["use_double_wide_mlp"]
    check_tensors(files.gguf, files.config)
    files.config["use_double_wide_mlp"] = False
    with pytest.raises(ModelFilesError, match=r"blk.3.ffn_gate.weight has the shape \(128, 64\), .* \(64, 64\)"):
        check_tensors(files.gguf, files.config)


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({"gemma4.feed_forward_length": [96, 96, 90, 192, 192]}, None, "one width, and twice that"),
        ({"gemma4.feed_forward_length": [96, 96, 96, 96, 192]}, None, "one width of layers with shared keys"),
        ({"gemma4.feed_forward_length": [96] * 4}, None, "5 whole numbers from 1 on"),
        ({"gemma4.attention.head_count_kv": [2, 2, 0, 2, 1]}, None, "5 whole numbers from 1 on"),
        (
            {"gemma4.attention.sliding_window_pattern": struct.pack("<IIQ5?", 9, 7, 5, *[True] * 5)},
            None,
            "the last one false, is needed",
        ),
        ({}, [1.0] * 4 + [8.0] * 12, "ones, and behind them numbers of 1e30"),
        ({}, [1e30] * 16, "ones, and behind them"),
        ({}, [1.0] * 8, "16 of F32 are needed"),
    ],
)
def test_other_layers_are_refused(
    changes: dict[str, Any], factors: list[float] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelFilesError, match=message):
        configuration(file(tmp_path, changes, factors))


def test_the_tokenizer_has_the_merges_of_the_file(tmp_path: Path) -> None:
    """Texts are merged as by the tokenizer that the file was made of; bytes stand for unknown characters."""
    letters = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters += [SPACE, "a", "b", "\n", f"{SPACE}a", "ab", f"{SPACE}ab", "\n\n"]
    merges = [(SPACE, "a"), ("a", "b"), (f"{SPACE}a", "b"), ("\n", "\n")]
    own = Tokenizer(
        models.BPE(
            {text: number for number, text in enumerate(letters)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    own.normalizer = normalizers.Replace(" ", SPACE)
    own.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": letters,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 256 + [1] * 8,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    converted = read_tokenizer(file(tmp_path, vocabulary))
    read = Tokenizer.from_str(converted.tokenizer_json)
    for sample in ("ab ab", " a\n\nb", "é ab"):
        assert read.encode(sample, add_special_tokens=False).ids == own.encode(sample).ids
        assert read.decode(own.encode(sample).ids) == sample
    assert read.encode("a").ids[0] == 2 and converted.tokenizer_config["bos_token"] == "<bos>" and converted.ends == [1]
