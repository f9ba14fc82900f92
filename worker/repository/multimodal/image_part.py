"""The image part of a checkpoint: its configuration, and how pictures are prepared for it. No torch.

The part is kept in the configuration of a model under `image_part`, so that ranks and the fingerprint have it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from control.errors import ModelFilesError
from control.messages import ImageInput

FIELD = "image_part"
"""Where the configuration of a model has its image part."""

_STORED = re.compile(r"(?:model\.)?(?P<name>(?:visual|vision_tower|vision_model|multi_modal_projector)\..*)")

_QWEN_TOKEN, _QWEN_PLACEHOLDER = 151655, "<|image_pad|>"
_QWEN_SECTIONS = [24, 20, 20]
_BICUBIC = 3


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


def image_part(config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImagePart | None:
    """The image part of config.json, with `processor`, the content of preprocessor_config.json. None where the type's
    images are not served, the checkpoint is quantized, or no file says how images are prepared. Raises ModelFilesError
    naming a field of a wrong value."""
    reader = _READERS.get(str(config.get("model_type")))
    vision = config.get("vision_config")
    quantized = "quantization_config" in config or "compression_config" in config
    if reader is None or not isinstance(vision, dict) or not processor or quantized:
        return None
    return reader(config, vision, processor)


def part_of(config: Mapping[str, Any]) -> ImagePart | None:
    """The image part of a model's configuration as `inspect` made it."""
    given = config.get(FIELD)
    return None if given is None else msgspec.convert(given, ImagePart)


def image_name(stored: str) -> str | None:
    """The name of a tensor of the image part, without the prefix of the checkpoint; None for other tensors."""
    found = _STORED.fullmatch(stored)
    return found["name"] if found else None


def _qwen3_vl(config: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]) -> ImagePart:
    """As transformers' Qwen2VLImageProcessorPil reads the file: both sides become multiples of patch and merge size,
    within limits of pixels."""
    patch = _whole(processor, "patch_size", 14)
    merge = _whole(processor, "merge_size", 2)
    if (patch, merge) != (_whole(vision, "patch_size", 16), _whole(vision, "spatial_merge_size", 2)):
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
        kind="qwen3_vl",
        vision=dict(vision),
        input=ImageInput(
            kind="grid",
            token=_whole(config, "image_token_id", _QWEN_TOKEN),
            placeholder=_QWEN_PLACEHOLDER,
            unit=patch * merge,
            least_pixels=_whole(size, "shortest_edge", 56 * 56),
            most_pixels=_whole(size, "longest_edge", 28 * 28 * 1280),
            resample=_whole(processor, "resample", _BICUBIC),
        ),
        **_normalisation(processor, [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
        sections=_sections(config),
    )


def _sections(config: Mapping[str, Any]) -> list[int]:
    text: Any = config.get("text_config") or {}
    rope: Any = text.get("rope_scaling") or text.get("rope_parameters") or {}
    given = rope.get("mrope_section", _QWEN_SECTIONS)
    if not isinstance(given, list) or len(given) != 3 or not all(_is_whole(one, 0) for one in given):
        raise ModelFilesError(f"config.json has mrope_section = {given!r}; three whole numbers are needed.")
    return given


def _normalisation(processor: Mapping[str, Any], mean: list[float], std: list[float]) -> dict[str, Any]:
    """How pixels become numbers; the values given are the processor's own where the file has none."""
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if processor.get(name) is False:
            raise ModelFilesError(f"preprocessor_config.json has {name} = false, which is not supported for images.")
    found: dict[str, Any] = {}
    for name, default in (("mean", mean), ("std", std)):
        given = processor.get(f"image_{name}", default)
        if not isinstance(given, list) or len(given) != 3 or not all(isinstance(one, int | float) for one in given):
            raise ModelFilesError(f"preprocessor_config.json has image_{name} = {given!r}; three numbers are needed.")
        found[name] = given
    factor = processor.get("rescale_factor", 1 / 255)
    if not isinstance(factor, int | float) or not factor > 0:
        raise ModelFilesError(f"preprocessor_config.json has rescale_factor = {factor!r}; a number is needed.")
    return found | {"rescale": factor}


def _whole(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not _is_whole(value, 1):
        raise ModelFilesError(f"The files for images have {name} = {value!r}; a whole number from 1 on is needed.")
    return value


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_READERS = {"qwen3_vl": _qwen3_vl}
