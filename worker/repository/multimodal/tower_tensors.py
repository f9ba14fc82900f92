"""The tensors of a vision tower, from the headers of safetensors files alone: names, types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from control.errors import ModelFilesError
from worker.repository.config_fields import number
from worker.repository.multimodal.image_fields import is_whole, whole
from worker.repository.multimodal.image_part import ImagePart, part_of
from worker.weights.formats import StoredTensor
from worker.weights.safetensors_header import FLOATS, image_tensors

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
    width, inner = whole(vision, "hidden_size", 768), whole(vision, "intermediate_size", 3072)
    patch, channels = whole(vision, "patch_size", 16), _channels(vision, "num_channels")
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
    width, inner = whole(vision, "hidden_size", 1152), whole(vision, "intermediate_size", 4304)
    patch, frames = whole(vision, "patch_size", 16), whole(vision, "temporal_patch_size", 2)
    merged, out = width * whole(vision, "spatial_merge_size", 2) ** 2, whole(vision, "out_hidden_size", 3584)
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
    if not isinstance(layers, list) or not all(is_whole(one, 0) for one in layers):
        raise ModelFilesError(
            f"vision_config.deepstack_visual_indexes = {layers!r}; whole numbers are needed. {_REMEDY}"
        )
    return layers
