"""MXFP4 (OCP Microscaling Formats 1.0): experts in 4-bit floats with a power of two for each 32 of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.repository.config_fields import number

GROUP = 32
"""Inputs that share a scale."""
BYTES = GROUP // 2


class Stored(Protocol):
    """A tensor's type as safetensors names it, and its shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def check(config: dict[str, Any], headers: Mapping[str, Stored], tp: int) -> None:
    """Raise ModelFilesError naming a tensor of the experts that is missing, or has another type or shape than
    config.json asks for; UnsupportedArchitecture where the experts' width has fewer groups than there are ranks."""
    experts, hidden, width = (
        number(config, name) for name in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    if width // GROUP < tp:
        raise UnsupportedArchitecture(
            f"intermediate_size = {width} has {width // GROUP} groups of {GROUP}, which {tp} ranks can't share. Use "
            f"--tp {max(1, width // GROUP)} or less."
        )
    for layer in range(number(config, "num_hidden_layers")):
        for leaf, outputs, inputs in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            if inputs % GROUP:
                raise ModelFilesError(f"config.json: MXFP4 needs sizes that {GROUP} divides, and {inputs} is none.")
            stem = f"model.layers.{layer}.mlp.experts.{leaf}"
            _expect(headers, f"{stem}_blocks", (experts, outputs, inputs // GROUP, BYTES))
            _expect(headers, f"{stem}_scales", (experts, outputs, inputs // GROUP))


def _expect(headers: Mapping[str, Stored], name: str, shape: tuple[int, ...]) -> None:
    found = headers.get(name)
    if found is None:
        raise ModelFilesError(f"The weights have no tensor {name}, which MXFP4 needs. Download the checkpoint again.")
    if found.dtype != "U8" or found.shape != shape:
        raise ModelFilesError(
            f"{name} is {found.dtype} of shape {list(found.shape)}; by config.json it is U8 of {list(shape)}. Is this "
            "the checkpoint of its config?"
        )
