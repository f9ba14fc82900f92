"""Multimodal checkpoints serve their text: the tokens are those of transformers' whole model on text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import models
from tests.integration.worker.engine.parity import LENGTHS, NEW, engine_of, mixed, prompt
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import write
from worker.families.registry import TEXT_PARTS
from worker.repository.files import inspect

SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
PART_SECTIONS: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}

TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"initializer_range": 0.2, **models.FAMILY_SHAPES["gemma3_text"]},
    # Without experts, and with values of their own, as the small ones of Gemma 4.
    "gemma4": {**models.FAMILY_SHAPES["gemma4_text"], "enable_moe_block": False, "attention_k_eq_v": False},
    "kimi_k25": {"model_type": "deepseek_v3", "tie_word_embeddings": True, **models.FAMILY_SHAPES["deepseek_v3"]},
    "llama4": models.FAMILY_SHAPES["llama4_text"],
    "mistral3": {"model_type": "ministral3", **models.FAMILY_SHAPES["ministral3"]},
    "qwen2_5_vl": {"rope_parameters": SECTIONS, "tie_word_embeddings": True},
    "qwen3_5": {"rope_parameters": PART_SECTIONS, **models.FAMILY_SHAPES["qwen3_5_text"]},
    "qwen3_5_moe": {"rope_parameters": PART_SECTIONS, **models.FAMILY_SHAPES["qwen3_5_moe_text"]},
    "qwen3_vl": {"rope_parameters": SECTIONS},
    "qwen3_vl_moe": {"rope_parameters": SECTIONS, **models.FAMILY_SHAPES["qwen3_moe"]},
}
VISION: dict[str, dict[str, Any]] = {
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    },
    "gemma3": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "kimi_k25": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "llama4": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "mistral3": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "qwen2_5_vl": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "qwen3_5": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "qwen3_5_moe": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 32,
        "depth": 1,
        "num_heads": 2,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    },
}
VISION["qwen3_vl_moe"] = VISION["qwen3_vl"]
SERVED_AS = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "mistral3": "ministral3",
    "qwen2_5_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A multimodal type's tiny checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = _make(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


def text_alone(folder: Path) -> Path:
    """The folder of the text part of a checkpoint whose other parts transformers can't make here."""
    return folder.with_name(f"{folder.name}-text")


def _make_gemma3n(folder: Path) -> Path:
    """The text part with the names that published files have, beside parts of other towers, which need a library of
    their own."""
    alone = models.make("gemma3n_text", text_alone(folder))
    tensors = {
        f"model.language_model.{name.removeprefix('model.')}": one
        for name, one in load_file(alone / "model.safetensors").items()
    }
    towers = {f"model.{name}_tower.conv.weight": torch.zeros(4) for name in ("vision", "audio")}
    save_file(tensors | towers, folder / "model.safetensors", {"format": "pt"})
    text = json.loads((alone / "config.json").read_text())
    whole = {"model_type": "gemma3n", "text_config": text, "vision_config": {}, "audio_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    models.tokenizer().save_pretrained(folder)
    return folder


def _make(kind: str, folder: Path) -> Path:
    if kind == "gemma3n":
        return _make_gemma3n(folder)
    text = models.SHAPE | TEXT[kind]
    tied = bool(text["tie_word_embeddings"])
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=VISION[kind], tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                layers = {"gemma3": 3.0, "gemma4": 1.0}.get(kind, 0.1) if "layers" in name else 0.1
                parameter.add_(layers * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if kind == "kimi_k25":
        _name_layers(folder / "model.safetensors")
    if kind == "qwen3_vl_moe":
        _put_inputs_first(folder / "model.safetensors")
    models.tokenizer().save_pretrained(folder)
    return folder


def _name_layers(file: Path) -> None:
    """transformers saves the layers of the text part under the name of those of images; published files don't."""
    tensors = load_file(file)
    text = "language_model.model."
    save_file(
        {name.replace(f"{text}blocks.", f"{text}layers."): one for name, one in tensors.items()}, file, {"format": "pt"}
    )


def _put_inputs_first(file: Path) -> None:
    """Published files have the inputs of experts before their outputs; transformers reads both."""
    tensors = load_file(file)
    experts = {name: one.mT.contiguous() for name, one in tensors.items() if ".experts." in name}
    assert experts
    save_file(tensors | experts, file, {"format": "pt"})


def generated(folder: Path, length: int) -> list[int]:
    # Experts in a plain loop: the grouped kernels lack float64.
    options = {"experts_implementation": "eager"} if "num_experts_per_tok" in inspect(folder).config else {}
    loader, source = AutoModelForImageTextToText, folder
    if text_alone(folder).exists():
        loader, source = AutoModelForCausalLM, text_alone(folder)
    model = loader.from_pretrained(source, dtype=torch.float64, **options)
    tokens = torch.tensor([prompt(length)])
    answer = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return answer[0, length:].tolist()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(TEXT_PARTS))
def test_text_equals_generate(kind: str, whole: Callable[[str], Path], ranks: RankGroup) -> None:
    """Greedy float64 tokens of one rank and of two are those of the whole model, in chunks of every size."""
    folder, jobs = whole(kind), mixed()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert any("vis" in name for name in list(file.keys()))
    assert inspect(folder).config["model_type"] == SERVED_AS[kind]
    expected = {length: generated(folder, length) for length in LENGTHS}
    assert len({tuple(one) for one in expected.values()}) == len(LENGTHS)
    assert all(len(set(one)) > 4 for one in expected.values())
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    for outcome in (play(engine_of(folder, "float64"), write(jobs)), ranks.ask("play", write(jobs))[0]):
        for job in jobs:
            assert outcome.tokens[job.sid] == expected[len(job.prompt)]
