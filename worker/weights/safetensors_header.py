"""Headers of safetensors files, and the names of their tensors in the model of the text or image part; no torch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from control.errors import ModelFilesAway, ModelFilesError
from worker.weights.formats import SAFETENSORS_TYPES, StoredTensor, check_apart

FLOATS = {"F16", "BF16", "F32"}
HEADER_LIMIT = 100_000_000
"""Bytes of a header, as in safetensors."""
BARE = "embed_tokens.weight"
"""The name of the embedding in a checkpoint of a model's body alone, as models for vectors have it: without `model.`"""

_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)*(?P<head>lm_head\.)?")
_OTHER = re.compile(
    r"(?:model\.)?(?:mtp|visual|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|multi_modal_projector)\."
)
_STORED = re.compile(r"(?:model\.)?(?P<name>(?:visual|vision_tower|vision_model|multi_modal_projector)\..*)")
_TOWER = "vision_tower."
_BACKBONE = "backbone."
"""The prefix of the body's names in files of nemotron_h."""
_INNER = "vision_tower.vision_model."


def text_name(stored: str) -> str | None:
    """The name that a tensor of a checkpoint has in the model of its text part; None for a tensor of another part."""
    if _OTHER.match(stored):
        return None
    match = _TEXT.match(stored)
    if match is None:
        return f"model.{stored.removeprefix(_BACKBONE)}" if stored.startswith(_BACKBONE) else stored
    return f"{'lm_head.' if match['head'] else 'model.'}{stored[match.end() :]}"


def image_name(stored: str) -> str | None:
    """The name of a tensor of the image part, without the prefixes of the checkpoint; None for other tensors."""
    match = _STORED.fullmatch(stored)
    if match is None:
        return None
    name = match["name"]
    return _TOWER + name.removeprefix(_INNER) if name.startswith(_INNER) else name


def text_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the text part by their names in its model."""
    tensors_by_name = {name: tensor for stored, tensor in tensors.items() if (name := text_name(stored)) is not None}
    return (
        {f"model.{name}": tensor for name, tensor in tensors_by_name.items()}
        if BARE in tensors_by_name
        else tensors_by_name
    )


def image_tensors(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of the image part by their names there."""
    return {name: tensor for stored, tensor in tensors.items() if (name := image_name(stored)) is not None}


def read_headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """All tensors of safetensors files by their stored names. Raises ModelFilesError naming a file that is no such
    file, ModelFilesAway naming one that is cut short or can't be read now."""
    return {name: tensor for path in files for name, tensor in _read_header(path).items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Every place lies in the file, fits type and shape, and is no other tensor's."""
    size = 0
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, HEADER_LIMIT):
                raise ValueError(f"its header should have {length} bytes")
            entries: dict[str, Any] = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        tensors = {name: _tensor(path, 8 + length, name, entry) for name, entry in entries.items()}
    except OSError as error:
        raise ModelFilesAway(f"{path} can't be read: {error}. Repair the file system.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ModelFilesError(
            f"{path} is not a safetensors file ({size} bytes): {error}. Download it again."
        ) from error
    end = max((tensor.start + tensor.bytes for tensor in tensors.values()), default=0)
    if size < end:
        raise ModelFilesAway(f"{path} is cut short: {size} bytes of {end}. Download it again.")
    check_apart(path, tensors)
    return tensors


def _tensor(path: Path, begin: int, name: str, entry: dict[str, Any]) -> StoredTensor:
    """Raises ValueError, KeyError or TypeError for an entry of a header that is wrong."""
    kind = SAFETENSORS_TYPES.get(entry["dtype"])
    shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
    if kind is None:
        raise ValueError(f"tensor {name} has the unknown type {entry['dtype']}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start)):
        raise ValueError(f"tensor {name} has the shape {list(shape)} and begins at {start}")
    size = kind.bytes_of(shape)
    if stop - start != size:
        raise ValueError(f"tensor {name} is {kind.name} of shape {list(shape)} and has {stop - start} bytes")
    return StoredTensor(path, kind, shape, begin + start, size)
