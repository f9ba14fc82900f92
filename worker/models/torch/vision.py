"""Vision towers in torch: what they read of an image, their positions, their forward, and how they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

from control.errors import ModelFilesError
from worker.models.served import AXES
from worker.models.torch.meta_model import build_meta
from worker.repository.multimodal import ImagePart
from worker.tensors import as_array, as_tensor
from worker.weights.checkpoint import StoredTensors, checked


def normalised(pixels: Tensor, rescale: float, mean: list[float], std: list[float]) -> Tensor:
    """Pixels (height, width, 3) uint8 as (3, height, width) float32: rescaled in double, then normalised in float."""
    image = (pixels.permute(2, 0, 1).double() * rescale).float()
    return (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]


def patches(image: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Patches (rows, channels · frames · patch²) of an image (channels, height, width), in the order in which `merge`
    by `merge` neighbours follow each other; a still image is repeated for each of `frames`."""
    channels, height, width = image.shape
    rows = height // patch
    columns = width // patch
    cut = image.reshape(channels, rows // merge, merge, patch, columns // merge, merge, patch)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6)
    cut = cut.unsqueeze(5).expand(*cut.shape[:5], frames, *cut.shape[5:])
    return cut.reshape(rows * columns, channels * frames * patch * patch)


# Rotary embeddings of sequences with images: a token has a position in time, one in height and one in width (mRoPE).
#
# https://arxiv.org/abs/2409.12191; qwen3_vl interleaves the sections.


def interleaved_axes(sections: list[int], frequencies: int) -> Tensor:
    """The axis, 0 to 2, by which each frequency turns: (frequencies,) int32."""
    axes = torch.zeros(frequencies, dtype=torch.int32)
    for axis in range(1, AXES):
        axes[axis : sections[axis] * AXES : AXES] = axis
    return axes


class SectionedRotary(nn.Module):
    """The rotary embedding of a model in torch. With `positions` (3, tokens) it takes these instead of the caller's."""

    def __init__(self, inner: Any, axes: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self._axes = axes.long()
        self.positions: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, tokens, head dim)."""
        if self.positions is None:
            return self.inner(x, position_ids)
        angles = self.positions[self._axes].T.float() * self.inner.inv_freq.float()
        doubled = torch.cat((angles, angles), dim=-1).unsqueeze(0)
        scale = self.inner.attention_scaling
        return (doubled.cos() * scale).to(x.dtype), (doubled.sin() * scale).to(x.dtype)


@dataclass(frozen=True)
class Features:
    """The features in place of an image's tokens. `rows` (tokens, hidden) are their embeddings; `layers` (layers,
    tokens, hidden) is added to the outputs of the first layers (deepstack)."""

    rows: NDArray[Any]
    layers: NDArray[Any]


class ImageEncoder(Protocol):
    """transformers' modules of an image part, with the weights of the checkpoint."""

    @property
    def blocks(self) -> Iterable[Any]:
        """The layers, one after the other."""
        ...

    def parameters(self) -> Iterable[Tensor]: ...

    def __call__(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and layers of the features of normalised pixels (3, height, width) in the encoder's own type."""
        ...


class VisionTower:
    """Encodes one image at a time. `progress` changes with each layer, for any thread."""

    def __init__(self, part: ImagePart, encoder: ImageEncoder, axes: Tensor | None) -> None:
        """`axes`: by which axis each frequency of a head turns; None where a token has one position."""
        self.input = part.input
        self.axes = axes
        self.whole = part.whole
        self._part = part
        self._encoder = encoder
        self.progress = 0
        for block in encoder.blocks:
            block.register_forward_hook(self._block_done)

    def _block_done(self, *_: Any) -> None:
        self.progress += 1

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the tokens of an image of so many pixels; 0 for a size that the tower does not take."""
        side = self.input.side
        if side and (height, width) != (side, side):
            return 0, 0
        return height // self.input.unit, width // self.input.unit

    @property
    def bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._encoder.parameters())

    @torch.inference_mode()
    def encode(self, pixels: NDArray[np.uint8]) -> Features:
        """`pixels`: (height, width, 3) uint8, sides that `grid` divides."""
        image = normalised(torch.from_numpy(pixels), self._part.rescale, self._part.mean, self._part.std)
        rows, layers = self._encoder(image.to(next(iter(self._encoder.parameters())).dtype))
        return Features(as_array(rows), as_array(layers))


# The encoder of gemma3: SigLIP over all patches of an image, whose outputs are averaged by neighbours and projected to
# the width of the text part.


class SiglipEncoder(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        """`config`: transformers' Gemma3Config. The parameters are on the meta device. Pooling of a whole image to one
        vector is left out: nothing reads it."""
        super().__init__()
        config.vision_config.vision_use_head = False

        def make() -> nn.Module:
            return AutoModel.from_config(config.vision_config, dtype=dtype, attn_implementation="sdpa")

        self.vision_tower: Any = build_meta(make, dtype)
        with torch.device("meta"):
            self.multi_modal_projector = Gemma3MultiModalProjector(config)

    @property
    def blocks(self) -> Any:
        return self.vision_tower.encoder.layers

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        encoded = self.vision_tower(pixel_values=image.unsqueeze(0), return_dict=True)
        rows = self.multi_modal_projector(encoded.last_hidden_state)[0]
        return rows, rows.new_empty(0, *rows.shape)


# The encoder of Qwen's models with images: patches of any number of rows and columns, merged by neighbours.


class QwenEncoder(nn.Module):
    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        """`config`: transformers' vision configuration. The parameters are on the meta device."""
        super().__init__()

        def make() -> nn.Module:
            return AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")

        self.visual: Any = build_meta(make, dtype)

    @property
    def blocks(self) -> Any:
        return self.visual.blocks

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        config = self.visual.config
        cut = patches(image, config.patch_size, config.spatial_merge_size, config.temporal_patch_size)
        height, width = (side // config.patch_size for side in image.shape[1:])
        encoded = self.visual(cut, grid_thw=torch.tensor([[1, height, width]]), return_dict=True)
        rows = encoded.pooler_output
        deep = getattr(encoded, "deepstack_features", ())
        return rows, torch.stack(list(deep)) if len(deep) else rows.new_empty(0, *rows.shape)


# Loads a vision tower: transformers' modules in the model's type, never packed, with the weights of the checkpoint.


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
