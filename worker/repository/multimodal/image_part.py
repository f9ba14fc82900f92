"""The image part of a checkpoint: its configuration, and how pictures are prepared for it. No torch.

The part is kept in the configuration of a model under `image_part`, so that ranks and the fingerprint have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from control.messages import ImageInput
from worker.families.family import Images
from worker.families.registry import TEXT_PARTS

FIELD = "image_part"
"""Where the configuration of a model has its image part."""


class ImagePart(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a model that a rank needs to encode images."""

    kind: str
    """The model type of the checkpoint."""
    vision: dict[str, Any]
    """Its `vision_config`."""
    input: ImageInput
    mean: list[float]
    std: list[float]
    rescale: float
    """Pixels, 0 to 255, are multiplied by it, then normalised by `mean` and `std`."""
    sections: list[int] | None = None
    """Frequencies of a head's rotary embedding that turn by time, height and width, interleaved; None: a token has one
    position."""
    whole: bool = False
    """True if the tokens of an image attend to each other, later ones included: a chunk then has all of an image's
    tokens, or none."""

    @property
    def images(self) -> Images:
        """What the record of the model type says of its images."""
        images = TEXT_PARTS[self.kind].images
        assert images is not None, f"images of {self.kind} are not served"
        return images


def part_of(config: Mapping[str, Any]) -> ImagePart | None:
    """The image part of a model's configuration as `inspect` made it."""
    part = config.get(FIELD)
    return None if part is None else msgspec.convert(part, ImagePart)
