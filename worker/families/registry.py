"""All served model types, found in the files of this folder, and the well-known ones that are not served.

A type is there because its parity tests pass: its greedy tokens equal those of transformers in float64.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker.families.family import Family, TextPart
from worker.families.gguf import Gguf

_SHARED = {"encoders", "family", "fields", "gguf", "parts", "recurrence", "registry"}
_MODULES = [
    importlib.import_module(f"worker.families.{module.name}")
    for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    if module.name not in _SHARED
]

FAMILIES: dict[str, Family] = {family.model_type: family for module in _MODULES for family in module.FAMILIES}

TEXT_PARTS: dict[str, TextPart] = {
    part.whole: part for module in _MODULES for part in getattr(module, "TEXT_PARTS", ())
}
"""By the model type of a checkpoint with other parts, its text part."""

SAME: dict[str, str] = {kind: same for module in _MODULES for kind, same in getattr(module, "SAME", {}).items()}
"""Model types of published files, and the type that has the same models."""

GGUF_ARCHITECTURES: dict[str, list[tuple[Family, Gguf]]] = {}
"""The records of each architecture; the one for what is left is the last."""
for _family in FAMILIES.values():
    for _gguf in _family.gguf:
        GGUF_ARCHITECTURES.setdefault(_gguf.architecture, []).append((_family, _gguf))
for _several in GGUF_ARCHITECTURES.values():
    _several.sort(key=lambda pair: pair[1].when is None)

_MLA = "its attention keeps compressed keys and values (MLA) in a form that is not known"
_TWO_WIDTHS = "heads of its values have another width than those of its keys"
_RECURRENT = "its layers keep a recurrent state"
_CHUNKED = "its attention ends at the borders of chunks"
_ALTERED = "its layers predict and correct several hidden states (AltUp)"
_ENCODER = "it is no decoder that generates text"
_TWO_PARTS = "an encoder reads the input and a decoder writes"
_OTHER_INPUTS = "it has parts for images or sound, and its text part is not known"
_ALIBI = "biases of attention stand for positions (ALiBi)"
_BY_HEAD = "its queries, keys and values lie by head in one matrix"
_BARE_NORMS = "its norms have no weights"
_PART = "it is one part of a model; give the folder of the whole"
_POSITIONS = "its positions are no rotary embedding"
_UNKNOWN = "no record describes its layers"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v32", "glm_moe_dsa", "minicpm3"), _MLA),
    **dict.fromkeys(("kimi_linear", "minimax", "mamba", "mamba2", "falcon_mamba"), _RECURRENT),
    **dict.fromkeys(("bamba", "jamba", "zamba2"), _RECURRENT),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), _RECURRENT),
    **dict.fromkeys(("bloom", "mpt"), _ALIBI),
    **dict.fromkeys(("falcon", "gpt_neox", "gpt_neox_japanese", "persimmon"), _BY_HEAD),
    **dict.fromkeys(("nanochat", "olmo"), _BARE_NORMS),
    **dict.fromkeys(("codegen", "gptj"), _UNKNOWN),  # their positions are rotary, which no field shows
    "afmoe": "its attention has a gate of its own",
    "bitnet": "norms lie within its attention and feed-forward networks",
    "blt": "it reads bytes in patches",
    "dbrx": "its queries, keys and values are limited (clip_qkv)",
    "diffllama": "its attention is the difference of two",
    "doge": "its attention has a learned mask",
    "jetmoe": "its attention is a mixture of experts",
    "nemotron": "one is added to the weights of its layer norms",
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "deberta-v2", "t5"), _ENCODER),
}
"""Well-known model types that are not served, with the reason."""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_MLA, ("kv_lora_rank",)),
    (_RECURRENT, ("state_size", "ssm_state_size", "mamba_d_state", "mamba_expand", "linear_num_value_heads")),
    (_CHUNKED, ("attention_chunk_size",)),
    (_ALTERED, ("altup_num_inputs",)),
    (_TWO_WIDTHS, ("v_head_dim",)),
    (_OTHER_INPUTS, ("vision_config", "audio_config")),
    (_ENCODER, ("image_size", "num_mel_bins", "num_channels", "sampling_rate", "type_vocab_size")),
    (_ALIBI, ("alibi",)),
)
"""Mechanisms of types without a record, and the fields of config.json that show them; the first one counts."""


_PARTS = ("_text", "_vision", "_audio", "_text_model", "_vision_model", "_talker", "_encoder", "_decoder")
"""Ends of the names of types that transformers has as parts of others."""


def mechanism_of(config: Mapping[str, Any]) -> str:
    """The mechanism for which a type without a record can't be served, as far as its config.json shows it."""
    kind = str(config.get("model_type"))
    if kind in REFUSED:
        return REFUSED[kind]
    if kind.endswith(_PARTS) and "text_config" not in config:
        return _PART
    if config.get("is_encoder_decoder"):
        return _TWO_PARTS
    for reason, fields in _SIGNS:
        if any(config.get(field) for field in fields):
            return reason
    return _UNKNOWN if "rope_theta" in config or "rope_parameters" in config else _POSITIONS
