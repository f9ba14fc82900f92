"""Which checkpoints with images are served with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control.errors import ModelFilesError
from worker.families.registry import TEXT_PARTS
from worker.repository.multimodal.gemma_images import gemma3_part
from worker.repository.multimodal.image_part import ImagePart
from worker.repository.multimodal.qwen_images import qwen_part


def image_part(config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImagePart | None:
    """The image part of config.json, with `processor`, the content of preprocessor_config.json. None where the type's
    images are not served, or no file says how images are prepared. Raises ModelFilesError naming a field of a wrong
    value."""
    part = TEXT_PARTS.get(str(config.get("model_type")))
    images = None if part is None else part.images
    vision = config.get("vision_config")
    if images is None or not isinstance(vision, dict) or not processor:
        return None
    try:
        return _READERS[images.tower](images, config, vision, processor)
    except ModelFilesError as error:
        raise ModelFilesError(f"{error} Or serve its text alone, with --no-images.") from error


_READERS = {"siglip": gemma3_part, "qwen": qwen_part}
