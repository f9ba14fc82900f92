"""Rotary embeddings as transformers describes them, from the metadata of a GGUF file."""

from __future__ import annotations

import math
import struct
from typing import Any

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.repository.gguf.model import GgufModel

FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of all Llama 3.1 to 3.3 models. A file has only the factors that follow from them."""
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Parameters of yarn that a file may have, with their defaults."""
TOLERANCE = 1e-4
_DEFAULT_THETA = 10000.0


def parameters(model: GgufModel, width: int) -> dict[str, Any]:
    """`rope_parameters` of heads that are `width` wide. Raises UnsupportedArchitecture for a scaling that is none of
    transformers', ModelFilesError for a damaged one."""
    name = model.architecture
    base = {"rope_theta": model.real(f"{name}.rope.freq_base", _DEFAULT_THETA)}
    if FACTORS in model.tensors:
        return base | _llama3(model, base["rope_theta"], width)
    kind = model.text(f"{name}.rope.scaling.type", "none")
    if kind == "none" and f"{name}.rope.scale_linear" in model.fields:  # files from before there were types
        return base | {"rope_type": "linear", "factor": model.real(f"{name}.rope.scale_linear")}
    if kind == "none":
        return base | {"rope_type": "default"}
    factor = model.real(f"{name}.rope.scaling.factor")
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    prefix = f"{name}.rope.scaling.yarn_"
    if kind == "yarn" and not {key for key in model.fields if key.startswith(prefix)} - {prefix + one for one in BETAS}:
        original = model.whole(f"{name}.rope.scaling.original_context_length")
        betas = {one: model.real(prefix + one, default) for one, default in BETAS.items()}
        return base | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    raise UnsupportedArchitecture(
        f"{model.files[0]}: {name}.rope.scaling.type is {kind[:40]!r}, or has parameters that are not supported. "
        "Use a file with none, linear or plain yarn."
    )


def _llama3(model: GgufModel, theta: float, width: int) -> dict[str, Any]:
    """The factors' largest is the scaling's; the others must follow from it."""
    stored = model.tensors[FACTORS]
    if stored.type.name != "f32" or stored.shape != (width // 2,):
        raise ModelFilesError(f"{stored.path}: {FACTORS} is {stored.type.name} of shape {stored.shape}.")
    with stored.path.open("rb") as file:
        file.seek(stored.start)
        given = struct.unpack(f"<{width // 2}f", file.read(stored.bytes))
    factor = max(given)
    expected = [_factor(theta ** (2 * index / width), factor) for index in range(width // 2)]
    pairs = zip(given, expected, strict=True)
    if not all(math.isclose(one, other, rel_tol=TOLERANCE) for one, other in pairs):
        raise UnsupportedArchitecture(
            f"{stored.path}: the factors in {FACTORS} are not Llama 3's, and no others are supported."
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _factor(period: float, factor: float) -> float:
    """By how much the frequency 1 / `period` is divided, as llama.cpp's converter computes it."""
    low, high, original = (
        LLAMA3["low_freq_factor"],
        LLAMA3["high_freq_factor"],
        LLAMA3["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi * period
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
