"""A vision tower: transformers' module, whole on every rank, with the weights of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from control.errors import ModelFilesError
from worker.models.checkpoint import StoredTensors, checked
from worker.models.meta_model import build_meta
from worker.models.vision.pixels import CHANNELS, normalised, patches
from worker.models.vision.rotary import interleaved_axes
from worker.repository.multimodal.image_part import ImagePart


@dataclass(frozen=True)
class Features:
    """The features in place of an image's tokens. `rows` (tokens, hidden) are their embeddings; `layers` (layers,
    tokens, hidden) is added to the outputs of the first layers (deepstack)."""

    rows: Tensor
    layers: Tensor


class VisionTower:
    """Encodes one image at a time. `progress` changes with each layer, for any thread."""

    def __init__(self, part: ImagePart, module: Any, axes: Tensor) -> None:
        self.input, self.axes = part.input, axes
        """`axes`: by which axis each frequency of a head turns."""
        self._part, self._module = part, module
        self.progress = 0
        for block in module.blocks:
            block.register_forward_hook(self._block_done)

    def _block_done(self, *_: Any) -> None:
        self.progress += 1

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tokens of an image of so many pixels."""
        return height // self.input.unit, width // self.input.unit

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._module.parameters())

    @torch.inference_mode()
    def encode(self, pixels: Tensor) -> Features:
        """`pixels`: (height, width, 3) uint8, sides that `grid` divides."""
        part, vision = self._part, self._module.config
        image = normalised(pixels, part.rescale, part.mean, part.std)
        cut = patches(image, vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size)
        height, width = (side // vision.patch_size for side in pixels.shape[:2])
        weight = next(self._module.parameters())
        found = self._module(cut.to(weight.dtype), grid_thw=torch.tensor([[1, height, width]]), return_dict=True)
        rows, deep = found.pooler_output, found.deepstack_features
        return Features(rows, torch.stack(list(deep)) if len(deep) else rows.new_empty(0, *rows.shape))


def load_tower(
    part: ImagePart, checkpoint: StoredTensors, dtype: torch.dtype, text: Any, done: Callable[[], None]
) -> VisionTower:
    """The tower in `dtype`; `text` is the text part's configuration. Raises ModelFilesError."""
    config = _configuration(part)
    if config.out_hidden_size != text.hidden_size:
        raise ModelFilesError(
            f"vision_config.out_hidden_size = {config.out_hidden_size}, but the text part's hidden_size is "
            f"{text.hidden_size}. Use the config.json of these weights."
        )
    if config.in_channels != CHANNELS:
        raise ModelFilesError(f"vision_config.in_channels = {config.in_channels}; images have {CHANNELS}.")

    def make() -> nn.Module:
        return AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")

    module: Any = build_meta(make, dtype)
    for name, parameter in list(module.named_parameters()):
        stored = checked(name, checkpoint.read(f"visual.{name}"), list(parameter.shape))
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = nn.Parameter(stored.to(dtype, copy=True), requires_grad=False)
        done()
    assert part.sections is not None, "of a kind with mRoPE"
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return VisionTower(part, module, interleaved_axes(part.sections, head_dim // 2))


def _configuration(part: ImagePart) -> Any:
    try:
        return CONFIG_MAPPING[part.kind].from_dict({"vision_config": dict(part.vision)}).vision_config
    except Exception as error:  # each class has checks of its own
        raise ModelFilesError(f"transformers refuses vision_config: {type(error).__name__}: {error}") from error
