"""Loads a vision tower: transformers' modules in the model's type, never packed, with the weights of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from control.errors import ModelFilesError
from worker.models.torch.vision.qwen import QwenEncoder
from worker.models.torch.vision.rotary import interleaved_axes
from worker.models.torch.vision.siglip import SiglipEncoder
from worker.models.torch.vision.tower import VisionTower
from worker.repository.multimodal.image_part import ImagePart
from worker.tensors import as_tensor
from worker.weights.checkpoint import StoredTensors, checked


def load_tower(
    part: ImagePart, checkpoint: StoredTensors, dtype: torch.dtype, text: Any, done: Callable[[], None]
) -> VisionTower:
    """The tower in `dtype`; `text` is the module of the text part. Raises ModelFilesError."""
    encoder = _encoder(part, dtype, text.config)
    modules: Any = encoder
    for name, parameter in list(encoder.named_parameters()):
        stored = as_tensor(checked(name, checkpoint.read(name), list(parameter.shape)))
        owner, _, leaf = name.rpartition(".")
        modules.get_submodule(owner)._parameters[leaf] = nn.Parameter(stored.to(dtype, copy=True), requires_grad=False)
        done()
    return VisionTower(part, encoder.eval(), None if part.sections is None else _axes(part.sections, text.model))


def _axes(sections: list[int], body: Any) -> Tensor:
    """Raises ModelFilesError for sections that are not those of the text part's rotary embedding."""
    rotary = body.rotaries[""] if hasattr(body, "rotaries") else body.rotary_emb
    frequencies = len(rotary.inv_freq)
    if sum(sections) != frequencies:
        raise ModelFilesError(
            f"config.json has mrope_section = {sections}, but a head turns by {frequencies} frequencies. Use the "
            "config.json of these weights."
        )
    return interleaved_axes(sections, frequencies)


def _encoder(part: ImagePart, dtype: torch.dtype, text: Any) -> QwenEncoder | SiglipEncoder:
    """The modules, with parameters on the meta device."""
    if part.images.tower == "siglip":
        tokens = (part.input.side // part.input.unit) ** 2
        fields = {"text_config": {"hidden_size": text.hidden_size}, "mm_tokens_per_image": tokens}
        return SiglipEncoder(_configuration(part, fields), dtype)
    return QwenEncoder(_configuration(part, {}).vision_config, dtype)


def _configuration(part: ImagePart, beside: dict[str, Any]) -> Any:
    try:
        return CONFIG_MAPPING[part.kind].from_dict({"vision_config": dict(part.vision)} | beside)
    except Exception as error:  # each class has checks of its own
        raise ModelFilesError(f"transformers refuses vision_config: {type(error).__name__}: {error}") from error
