"""Pixels as a vision tower takes them. The arithmetic is that of transformers' image processors for Pillow."""

from __future__ import annotations

import torch
from torch import Tensor


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
