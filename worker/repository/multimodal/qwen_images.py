"""The image part of qwen3_vl, qwen3_vl_moe, qwen3_5 and qwen3_5_moe, as transformers' Qwen2VLImageProcessorPil reads
the file: both sides of an image become multiples of patch and merge size, within limits of pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control.errors import ModelFilesError
from control.messages import ImageInput
from worker.families.family import Images
from worker.repository.multimodal.image_fields import is_whole, normalisation, whole
from worker.repository.multimodal.image_part import ImagePart

_PLACEHOLDER = "<|image_pad|>"
_BICUBIC = 3


def qwen_part(
    images: Images, config: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]
) -> ImagePart:
    """The image part. Raises ModelFilesError naming a field of a wrong value."""
    patch, merge = whole(processor, "patch_size", 14), whole(processor, "merge_size", 2)
    if (patch, merge) != (whole(vision, "patch_size", 16), whole(vision, "spatial_merge_size", 2)):
        raise ModelFilesError(
            f"preprocessor_config.json makes patches of {patch} pixels and merges {merge} of them, but config.json has "
            "other numbers. Use the files of one checkpoint."
        )
    size = processor.get("size")
    size = dict(size) if isinstance(size, dict) else {}
    for own, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if processor.get(older) is not None:
            size[own] = processor[older]
    return ImagePart(
        kind=str(config["model_type"]),
        vision=dict(vision),
        input=ImageInput(
            kind="grid",
            token=whole(config, "image_token_id", images.token),
            placeholder=_PLACEHOLDER,
            unit=patch * merge,
            least_pixels=whole(size, "shortest_edge", 56 * 56),
            most_pixels=whole(size, "longest_edge", 28 * 28 * 1280),
            resample=whole(processor, "resample", _BICUBIC),
        ),
        **normalisation(processor, [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
        sections=_sections(config, list(images.sections)),
    )


def _sections(config: Mapping[str, Any], default: list[int]) -> list[int]:
    text: Any = config.get("text_config") or {}
    rope: Any = text.get("rope_scaling") or text.get("rope_parameters") or {}
    sections = rope.get("mrope_section", default)
    if not isinstance(sections, list) or len(sections) != 3 or not all(is_whole(one, 0) for one in sections):
        raise ModelFilesError(f"config.json has mrope_section = {sections!r}; three whole numbers are needed.")
    return sections
