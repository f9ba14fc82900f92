"""The image part of checkpoints is checked: from metadata alone; what is served, and which field a refusal names."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from control.errors import ModelFilesError
from worker.repository.files import inspect
from worker.repository.multimodal import image_part, part_of
from worker.weights.safetensors_header import image_name

GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
GEMMA3_PROCESSOR: dict[str, Any] = {
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}
QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "text_config": {
        "model_type": "qwen3_5_text",
        "rope_parameters": {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_type": "default"},
    },
    "vision_config": {"depth": 27, "model_type": "qwen3_5", "patch_size": 16, "spatial_merge_size": 2},
}
QWEN35_PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def test_images_of_published_files() -> None:
    """256 tokens for an image of gemma3, whatever its size; squares of 32 pixels of qwen3_5."""
    gemma = image_part(GEMMA3, GEMMA3_PROCESSOR)
    assert gemma is not None and gemma.whole and gemma.sections is None
    assert (gemma.input.side // gemma.input.unit) ** 2 == 256 and gemma.input.token == 262144
    assert gemma.input.text == "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"
    qwen = image_part(QWEN35, QWEN35_PROCESSOR)
    assert qwen is not None and qwen.sections == [11, 11, 10] and not qwen.whole
    assert (qwen.input.unit, qwen.input.most_pixels, qwen.input.text) == (32, 16777216, None)
    assert image_part(GEMMA3, {}) is None


@pytest.mark.parametrize(
    ("config", "processor", "why"),
    [
        ({}, {"do_pan_and_scan": True}, "do_pan_and_scan = true"),
        ({}, {"size": {"height": 448, "width": 448}}, "'height': 448.*image_size = 896"),
        ({}, {"size": "large"}, "size = 'large'"),
        ({"mm_tokens_per_image": 200}, {}, "mm_tokens_per_image = 200"),
        ({"mm_tokens_per_image": 81}, {}, "mm_tokens_per_image = 81"),
        ({"mm_tokens_per_image": "many"}, {}, "mm_tokens_per_image = 'many'"),
        ({"image_token_index": -1}, {}, "image_token_index = -1"),
        ({"vision_config": {"image_size": 896, "patch_size": 0}}, {}, "patch_size = 0"),
        ({}, {"image_mean": [0.5]}, r"image_mean = \[0.5\]"),
        ({}, {"do_resize": False}, "do_resize = false"),
    ],
)
def test_a_refusal_names_field_and_value(config: dict[str, Any], processor: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelFilesError, match=f"(?s){why}.*--no-images"):
        image_part(GEMMA3 | config, GEMMA3_PROCESSOR | processor)


def _folder(folder: Path, processor: dict[str, Any], file: str = "preprocessor_config.json") -> Path:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(GEMMA3))
    (folder / file).write_text(json.dumps(processor))
    return folder


def test_without_images_the_text_part_is_all(tmp_path: Path) -> None:
    """Also where the files for images are wrong: they are not read then."""
    folder = _folder(tmp_path, GEMMA3_PROCESSOR | {"do_pan_and_scan": True})
    with pytest.raises(ModelFilesError, match="do_pan_and_scan"):
        inspect(folder)
    config = inspect(folder, images=False).config
    assert part_of(config) is None and config["model_type"] == "gemma3_text"


def test_processors_of_transformers_5_are_in_another_file(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"image_processor": GEMMA3_PROCESSOR}, "processor_config.json")
    part = part_of(inspect(folder).config)
    assert part is not None and part.input.side == 896


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("vision_tower.vision_model.post_layernorm.bias", "vision_tower.post_layernorm.bias"),
        ("model.vision_tower.post_layernorm.bias", "vision_tower.post_layernorm.bias"),
        ("multi_modal_projector.mm_soft_emb_norm.weight", "multi_modal_projector.mm_soft_emb_norm.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", "visual.blocks.0.attn.qkv.weight"),
        ("language_model.model.norm.weight", None),
    ],
)
def test_names_of_the_image_part(stored: str, name: str | None) -> None:
    """Published files, and those that transformers 5 writes, lead to one name."""
    assert image_name(stored) == name
