"""All served model types, found in the files of this folder, and the well-known ones that are not served.

A type is there because its parity tests pass: its greedy tokens equal those of transformers in float64.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from worker.families.family import Family, TextPart
from worker.families.gguf import Gguf

_SHARED = {"family", "gguf", "mamba", "parts", "recurrence", "registry", "roles", "short_convolution"}
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

GGUF_ARCHITECTURES: dict[str, tuple[Family, Gguf]] = {
    gguf.architecture: (family, gguf) for family in FAMILIES.values() for gguf in family.gguf
}

_MLA = "its attention keeps compressed keys and values (MLA)"
_RECURRENT = "its layers keep a recurrent state"
_CHUNKED = "its attention ends at the borders of chunks"
_ALTERED = "its layers predict and correct several hidden states (AltUp)"
_ENCODER = "it is no decoder that generates text"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"), _MLA),
    **dict.fromkeys(("kimi_linear", "lfm2_moe", "minimax", "mamba", "mamba2", "falcon_mamba"), _RECURRENT),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "nemotron_h", "zamba2"), _RECURRENT),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKED),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _ALTERED),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "deberta-v2", "t5"), _ENCODER),
}
"""Well-known model types that are not served, with the reason."""
