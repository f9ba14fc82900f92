"""A vision tower: an encoder of images, whole on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.models.torch.vision.pixels import normalised
from worker.repository.multimodal.image_part import ImagePart
from worker.tensors import as_array


@dataclass(frozen=True)
class Features:
    """The features in place of an image's tokens. `rows` (tokens, hidden) are their embeddings; `layers` (layers,
    tokens, hidden) is added to the outputs of the first layers (deepstack)."""

    rows: NDArray[Any]
    layers: NDArray[Any]


class Encoder(Protocol):
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

    def __init__(self, part: ImagePart, encoder: Encoder, axes: Tensor | None) -> None:
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
