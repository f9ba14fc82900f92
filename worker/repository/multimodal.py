"""Checkpoints with images: their image part, which is prepared without torch, and their text part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from control.errors import ModelFilesError
from control.messages import ImageInput
from worker.families.family import Images
from worker.families.fields import is_whole
from worker.families.registry import FAMILIES, SAME, TEXT_PARTS
from worker.repository.config_fields import number
from worker.weights.formats import StoredTensor
from worker.weights.safetensors_header import FLOATS, image_tensors

# The image part of a checkpoint: its configuration, and how pictures are prepared for it. No torch.
#
# The part is kept in the configuration of a model under `image_part`, so that ranks and the fingerprint have it.


FIELD = "image_part"
"""The field of a model's configuration that has its image part."""


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
        """The images of the model type's record."""
        images = TEXT_PARTS[self.kind].images
        assert images is not None, f"images of {self.kind} are not served"
        return images


def part_of(config: Mapping[str, Any]) -> ImagePart | None:
    """The image part of a model's configuration as `inspect` made it."""
    part = config.get(FIELD)
    return None if part is None else msgspec.convert(part, ImagePart)


# Fields of the files that describe an image part: each is checked, and an error names the field and its value.


def whole(fields: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number from 1 on; `default` where the field is missing. Raises ModelFilesError."""
    value = fields.get(name)
    value = default if value is None else value
    if not is_whole(value):
        raise ModelFilesError(f"The files for images have {name} = {value!r}; a whole number from 1 on is needed.")
    return value


def normalisation(processor: Mapping[str, Any], mean: list[float], std: list[float]) -> dict[str, Any]:
    """The normalisation of pixels, as fields of an ImagePart; `mean` and `std` are the processor's own where the file
    has none. Raises ModelFilesError."""
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if processor.get(name) is False:
            raise ModelFilesError(f"preprocessor_config.json has {name} = false, which is not supported for images.")
    fields: dict[str, Any] = {}
    for name, default in (("mean", mean), ("std", std)):
        values = processor.get(f"image_{name}", default)
        if (
            not isinstance(values, list)
            or len(values) != 3
            or not all(isinstance(value, int | float) for value in values)
        ):
            raise ModelFilesError(f"preprocessor_config.json has image_{name} = {values!r}; three numbers are needed.")
        fields[name] = values
    factor = processor.get("rescale_factor", 1 / 255)
    if not isinstance(factor, int | float) or not factor > 0:
        raise ModelFilesError(f"preprocessor_config.json has rescale_factor = {factor!r}; a number is needed.")
    return fields | {"rescale": factor}


# The image part of gemma3, as transformers' Gemma3Processor prepares images: each becomes a square of one size without
# keeping its proportions (pan and scan is off, as it is there), and a fixed number of tokens between two marks.


_BEGIN = "<start_of_image>"
_PLACE = "<image_soft_token>"
_END = "<end_of_image>"
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
    side = whole(vision, "image_size", 224)
    patch = whole(vision, "patch_size", 16)
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


# The image part of qwen3_vl, qwen3_vl_moe, qwen3_5 and qwen3_5_moe, as transformers' Qwen2VLImageProcessorPil reads
# the file: both sides of an image become multiples of patch and merge size, within limits of pixels.


_PLACEHOLDER = "<|image_pad|>"
_BICUBIC = 3


def qwen_part(
    images: Images, config: Mapping[str, Any], vision: Mapping[str, Any], processor: Mapping[str, Any]
) -> ImagePart:
    """The image part. Raises ModelFilesError naming a field of a wrong value."""
    patch = whole(processor, "patch_size", 14)
    merge = whole(processor, "merge_size", 2)
    if (patch, merge) != (whole(vision, "patch_size", 16), whole(vision, "spatial_merge_size", 2)):
        raise ModelFilesError(
            f"preprocessor_config.json makes patches of {patch} pixels and merges {merge} of them, but config.json has "
            "other numbers. Use the files of one checkpoint."
        )
    size = processor.get("size")
    size = dict(size) if isinstance(size, dict) else {}
    for name, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if processor.get(older) is not None:
            size[name] = processor[older]
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
    if not isinstance(sections, list) or len(sections) != 3 or not all(is_whole(section, 0) for section in sections):
        raise ModelFilesError(f"config.json has mrope_section = {sections!r}; three whole numbers are needed.")
    return sections


# Which checkpoints with images are served with them.


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


# The text part of a checkpoint with images: its configuration.
#
# Only text is served, and for text such a model computes what the model of its text part computes: where a token's
# position has several rows (mRoPE), they are equal.


_FROM_THE_WHOLE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")
"""Fields that checkpoints have beside `text_config`, and that are meant for it too."""

_SECTIONS = ("mrope_section", "mrope_interleaved")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text part, as that of a model alone; of another model type `config` itself, under the
    name of the type that has the same models. Fields that follow from others are there. Raises ModelFilesError for a
    `text_config` that is none."""
    text = _text_config(config)
    family = FAMILIES.get(str(text.get("model_type")))
    return text if family is None else family.completed(text)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    kind = str(config.get("model_type"))
    part = TEXT_PARTS.get(kind)
    if part is None:
        return config | {"model_type": SAME[kind]} if kind in SAME else config
    # Older files of Qwen2.5-VL have the fields of the text part beside the others.
    text_config = config.get("text_config", config)
    if not isinstance(text_config, dict):
        raise ModelFilesError(f"config.json has text_config = {text_config!r}; an object is needed.")
    text = {**part.defaults, **{name: value for name, value in text_config.items() if name != "vision_config"}}
    for name in _FROM_THE_WHOLE:
        if config.get(name) is not None:
            text.setdefault(name, config[name])
    tied = (fields.get("tie_word_embeddings") for fields in (config, text_config))
    text["tie_word_embeddings"] = next((value for value in tied if value is not None), part.tied)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := text.get(name), dict):
            text[name] = _rope_of_text(rope)
    text["model_type"] = part.model_type or text.get("model_type")
    return {**text, **part.always}


def _rope_of_text(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary embedding without the sections of mRoPE, which are alike for text."""
    parameters = {name: value for name, value in rope.items() if name not in _SECTIONS}
    for name in ("type", "rope_type"):
        if parameters.get(name) == "mrope":
            parameters[name] = "default"
    return parameters


# The tensors of a vision tower, from the headers of safetensors files alone: names, types and shapes.


Shapes = dict[str, tuple[int, ...]]

_CHANNELS = 3
_REMEDY = "Use the config.json of these weights, or serve the text alone with --no-images."


def check(config: dict[str, Any], tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ModelFilesError naming the field of the image part, or the tensor of the tower, that does not fit.
    `tensors` are those of the files."""
    part = part_of(config)
    if part is None:
        return
    if part.input.token >= number(config, "vocab_size"):
        raise ModelFilesError(
            f"Token {part.input.token} stands for images, but vocab_size = {config['vocab_size']}. {_REMEDY}"
        )
    present = image_tensors(tensors)
    quantized = "quantization_config" in config or "compression_config" in config
    remedy = f"A tower that is quantized too is not served. {_REMEDY}" if quantized else _REMEDY
    for name, shape in expected(part, number(config, "hidden_size")).items():
        stored = present.get(name)
        if stored is None:
            raise ModelFilesError(f"The weights have no tensor {name}, which vision_config asks for. {remedy}")
        if stored.shape != shape or stored.type.name not in FLOATS:
            raise ModelFilesError(
                f"Tensor {name} has the type {stored.type.name} and the shape {list(stored.shape)}, but vision_config "
                f"asks for numbers of 16 or 32 bits in the shape {list(shape)}. {remedy}"
            )


def expected(part: ImagePart, hidden: int) -> Shapes:
    """The shape of each tensor of the tower beside a text part of width `hidden`. Raises ModelFilesError naming a field
    of a wrong value."""
    return _siglip(part, hidden) if part.images.tower == "siglip" else _qwen(part, hidden)


def _siglip(part: ImagePart, hidden: int) -> Shapes:
    vision = part.vision
    width = whole(vision, "hidden_size", 768)
    inner = whole(vision, "intermediate_size", 3072)
    patch = whole(vision, "patch_size", 16)
    channels = _channels(vision, "num_channels")
    shapes = _layer("vision_tower.embeddings.patch_embedding", (width, channels, patch, patch))
    shapes["vision_tower.embeddings.position_embedding.weight"] = ((part.input.side // patch) ** 2, width)
    for number_of_layer in range(whole(vision, "num_hidden_layers", 12)):
        layer = f"vision_tower.encoder.layers.{number_of_layer}"
        shapes |= _layer(f"{layer}.layer_norm1", (width,)) | _layer(f"{layer}.layer_norm2", (width,))
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _layer(f"{layer}.self_attn.{name}", (width, width))
        shapes |= _layer(f"{layer}.mlp.fc1", (inner, width)) | _layer(f"{layer}.mlp.fc2", (width, inner))
    shapes |= _layer("vision_tower.post_layernorm", (width,))
    shapes["multi_modal_projector.mm_input_projection_weight"] = (width, hidden)
    shapes["multi_modal_projector.mm_soft_emb_norm.weight"] = (width,)
    return shapes


def _qwen(part: ImagePart, hidden: int) -> Shapes:
    vision = part.vision
    width = whole(vision, "hidden_size", 1152)
    inner = whole(vision, "intermediate_size", 4304)
    patch = whole(vision, "patch_size", 16)
    frames = whole(vision, "temporal_patch_size", 2)
    merged = width * whole(vision, "spatial_merge_size", 2) ** 2
    out = whole(vision, "out_hidden_size", 3584)
    if out != hidden:
        raise ModelFilesError(
            f"vision_config.out_hidden_size = {out}, but the text part's hidden_size is {hidden}. {_REMEDY}"
        )
    shapes = _layer("visual.patch_embed.proj", (width, _channels(vision, "in_channels"), frames, patch, patch))
    shapes["visual.pos_embed.weight"] = (whole(vision, "num_position_embeddings", 2304), width)
    for number_of_layer in range(whole(vision, "depth", 27)):
        layer = f"visual.blocks.{number_of_layer}"
        shapes |= _layer(f"{layer}.norm1", (width,)) | _layer(f"{layer}.norm2", (width,))
        shapes |= _layer(f"{layer}.attn.qkv", (3 * width, width)) | _layer(f"{layer}.attn.proj", (width, width))
        shapes |= _layer(f"{layer}.mlp.linear_fc1", (inner, width)) | _layer(f"{layer}.mlp.linear_fc2", (width, inner))
    mergers = {"visual.merger": width} | {
        f"visual.deepstack_merger_list.{index}": merged for index in range(len(_deepstack(part)))
    }
    for name, normed in mergers.items():
        shapes |= _layer(f"{name}.norm", (normed,))
        shapes |= _layer(f"{name}.linear_fc1", (merged, merged)) | _layer(f"{name}.linear_fc2", (out, merged))
    return shapes


def _layer(name: str, shape: tuple[int, ...]) -> Shapes:
    """A weight, and a bias of its outputs."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _channels(vision: Mapping[str, Any], name: str) -> int:
    if whole(vision, name, _CHANNELS) != _CHANNELS:
        raise ModelFilesError(f"vision_config.{name} = {vision[name]}; images have {_CHANNELS}. {_REMEDY}")
    return _CHANNELS


def _deepstack(part: ImagePart) -> list[int]:
    """The layers whose outputs are added to those of the text part's first ones."""
    default = list(part.images.deepstack)
    layers = part.vision.get("deepstack_visual_indexes", default) if default else []
    if not isinstance(layers, list) or not all(is_whole(layer, 0) for layer in layers):
        raise ModelFilesError(
            f"vision_config.deepstack_visual_indexes = {layers!r}; whole numbers are needed. {_REMEDY}"
        )
    return layers
