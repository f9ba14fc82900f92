"""The text part of multimodal checkpoints: configurations and names as their publishers write them."""

from __future__ import annotations

from typing import Any

import pytest

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.families.registry import TEXT_PARTS
from worker.repository import validation
from worker.repository.multimodal import text_config
from worker.weights.safetensors_header import text_name

GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
QWEN25: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32},
}


def test_a_sparse_text_config_has_transformers_defaults() -> None:
    """gemma3's file leaves heads, vocabulary and context out: the gate uses transformers' own numbers."""
    text = text_config(GEMMA3)
    validation.check(text, 2)
    assert (text["model_type"], text["num_attention_heads"], validation.kv_heads(text)) == ("gemma3_text", 8, 4)
    assert validation.context_length(text) == 131072 and text["tie_word_embeddings"] is True
    assert text["torch_dtype"] == "bfloat16" and validation.eos_ids(text, {}) == [1, 106]
    assert text_config(text) == text
    with pytest.raises(UnsupportedArchitecture, match="8 attention heads can't be divided among 3"):
        validation.check(text, 3)


def test_defaults_are_transformers_own() -> None:
    """Fields that gemma3's file leaves out, and ties of embedding and head."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind, part in TEXT_PARTS.items():
        whole = CONFIG_MAPPING[kind]()
        assert whole.tie_word_embeddings == part.tied, kind
        text = whole.text_config
        text.allow_global_per_layer_attribute_access = True  # gemma4's heads differ by layer
        assert {name: getattr(text, name) for name in part.defaults} == dict(part.defaults), kind


def test_a_type_with_the_models_of_another_is_that_type() -> None:
    assert text_config({"model_type": "kimi_k2", "hidden_size": 64}) == {"model_type": "deepseek_v3", "hidden_size": 64}


def test_fields_beside_those_of_images() -> None:
    """Qwen2.5-VL's own file has no text_config; mRoPE's sections are left out, other scaling stays."""
    text = text_config(QWEN25)
    validation.check(text, 2)
    assert text["model_type"] == "qwen2" and text["rope_scaling"] == {"type": "default"}
    assert "vision_config" not in text and text["tie_word_embeddings"] is True
    scaled = {"rope_type": "yarn", "factor": 2.0, "mrope_section": [16, 24, 24], "mrope_interleaved": True}
    nested = text_config({"model_type": "qwen3_vl", "text_config": QWEN25 | {"rope_scaling": scaled}})
    assert nested["rope_scaling"] == {"rope_type": "yarn", "factor": 2.0} and nested["model_type"] == "qwen3"


def test_what_the_text_part_can_not_be() -> None:
    """A quantised checkpoint is refused though its mark lies beside text_config, an unknown text type by its name."""
    marked = GEMMA3 | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(UnsupportedArchitecture, match="mxfp4"):
        validation.check(text_config(marked), 1)
    with pytest.raises(UnsupportedArchitecture, match="Model type 'odd' is not supported"):
        validation.check(text_config({"model_type": "mistral3", "text_config": {"model_type": "odd"}}), 1)
    with pytest.raises(ModelFilesError, match="text_config = 3"):
        text_config({"model_type": "gemma3", "text_config": 3})


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.language_model.layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.q_norm.weight"),
        ("model.language_model.model.norm.weight", "model.norm.weight"),
        ("vision_tower.vision_model.encoder.layers.0.layer_norm1.bias", None),
        ("multi_modal_projector.mm_input_projection_weight", None),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("visual.merger.mlp.0.weight", None),
    ],
)
def test_names_of_tensors(stored: str, name: str | None) -> None:
    """Each way of writing a text part's tensors leads to one name; those of images are left out."""
    assert text_name(stored) == name
