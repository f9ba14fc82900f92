"""The text part of a checkpoint with images: its configuration.

Only text is served, and for text such a model computes what the model of its text part computes: where a token's
position has several rows (mRoPE), they are equal.
"""

from __future__ import annotations

from typing import Any

from control.errors import ModelFilesError
from worker.families.registry import FAMILIES, SAME, TEXT_PARTS

_FROM_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")
"""Fields that checkpoints have beside `text_config`, and that are meant for it too."""

_SECTIONS = ("mrope_section", "mrope_interleaved")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text part, as that of a model alone; of another model type `config` itself, under the
    name of the type that has the same models. Fields that follow from others are there. Raises ModelFilesError for a
    `text_config` that is none."""
    text = _text_config(config)
    family = FAMILIES.get(str(text.get("model_type")))
    return text if family is None else family.completed(text)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    kind = str(config.get("model_type"))
    part = TEXT_PARTS.get(kind)
    if part is None:
        return config | {"model_type": SAME[kind]} if kind in SAME else config
    # Older files of Qwen2.5-VL have the fields of the text part beside the others.
    own = config.get("text_config", config)
    if not isinstance(own, dict):
        raise ModelFilesError(f"config.json has text_config = {own!r}; an object is needed.")
    text = {**part.defaults, **{name: value for name, value in own.items() if name != "vision_config"}}
    for name in _FROM_THE_WHOLE:
        if config.get(name) is not None:
            text.setdefault(name, config[name])
    tied = (one.get("tie_word_embeddings") for one in (config, own))
    text["tie_word_embeddings"] = next((one for one in tied if one is not None), part.tied)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(name), dict):
            text[name] = _rope_of_text(rope)
    text["model_type"] = part.model_type or text.get("model_type")
    return {**text, **part.always}


def _rope_of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary embedding without the sections of mRoPE, which are alike for text."""
    parameters = {name: value for name, value in rope.items() if name not in _SECTIONS}
    for name in ("type", "rope_type"):
        if parameters.get(name) == "mrope":
            parameters[name] = "default"
    return parameters
