"""The image part of gemma3, as transformers' Gemma3Processor prepares images: each becomes a square of one size without
keeping its proportions (pan and scan is off, as it is there), and a fixed number of tokens between two marks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from control.errors import ModelFilesError
from control.messages import ImageInput
from worker.families.family import Images
from worker.repository.multimodal.image_fields import normalisation, whole
from worker.repository.multimodal.image_part import ImagePart

_BEGIN, _PLACE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
TEXT = f"\n\n{_BEGIN}{_PLACE}{_END}\n\n"
"""An image in a prompt, with one token for all of its own."""
_BILINEAR = 2


def gemma3_part(
    images: Images, config: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]
) -> ImagePart:
    """The image part. Raises ModelFilesError naming a field of a wrong value."""
    if processor.get("do_pan_and_scan"):
        raise ModelFilesError(
            "preprocessor_config.json has do_pan_and_scan = true, but images are served whole. Set it to false."
        )
    side, patch = whole(vision, "image_size", 224), whole(vision, "patch_size", 16)
    size = processor.get("size") or {"height": 224, "width": 224}
    if not isinstance(size, dict) or (size.get("height"), size.get("width")) != (side, side):
        raise ModelFilesError(
            f"preprocessor_config.json has size = {size!r}, but vision_config.image_size = {side}. Use the files of "
            "one checkpoint."
        )
    tokens = whole(config, "mm_tokens_per_image", 256)
    columns = math.isqrt(tokens)
    if columns * columns != tokens or side % patch or side // patch % columns:
        raise ModelFilesError(
            f"config.json has mm_tokens_per_image = {tokens}, which are no squares of the {side // patch} by "
            f"{side // patch} patches of an image (image_size {side}, patch_size {patch})."
        )
    return ImagePart(
        kind="gemma3",
        vision=dict(vision),
        input=ImageInput(
            kind="square",
            token=whole(config, "image_token_index", images.token),
            placeholder=_BEGIN,
            text=TEXT,
            unit=side // columns,
            least_pixels=side * side,
            most_pixels=side * side,
            side=side,
            resample=whole(processor, "resample", _BILINEAR),
        ),
        **normalisation(processor, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
        whole=True,
    )
