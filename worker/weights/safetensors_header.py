"""Headers of safetensors files, and the names of their tensors in the model of the text or image part; no torch."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.errors import ModelFilesError

FLOATS = {"F16", "BF16", "F32"}

_TEXT = re.compile(r"(?:model\.)?language_model\.(?:model\.)*(?P<head>lm_head\.)?")
_OTHER = re.compile(
    r"(?:model\.)?(?:mtp|visual|vision_tower|vision_model|audio_tower|embed_vision|embed_audio|multi_modal_projector)\."
)
_STORED = re.compile(r"(?:model\.)?(?P<name>(?:visual|vision_tower|vision_model|multi_modal_projector)\..*)")
_TOWER, _INNER = "vision_tower.", "vision_tower.vision_model."


@dataclass(frozen=True)
class Header:
    """One tensor: its type as safetensors names it, its shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


Headers = dict[str, Header]


def text_name(stored: str) -> str | None:
    """The name that a tensor of a checkpoint has in the model of its text part; None for a tensor of another part."""
    if _OTHER.match(stored):
        return None
    found = _TEXT.match(stored)
    if found is None:
        return stored
    return f"{'lm_head.' if found['head'] else 'model.'}{stored[found.end() :]}"


def image_name(stored: str) -> str | None:
    """The name of a tensor of the image part, without the prefixes of the checkpoint; None for other tensors."""
    found = _STORED.fullmatch(stored)
    if found is None:
        return None
    name = found["name"]
    return _TOWER + name.removeprefix(_INNER) if name.startswith(_INNER) else name


def headers_of(files: list[Path], named: Callable[[str], str | None] = text_name) -> Headers:
    """The tensors of the text part by their names there, or those that `named` gives a name. Raises ModelFilesError
    naming a file that is no such file."""
    found: Headers = {}
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > path.stat().st_size:
                    raise ValueError(f"its header should have {length} bytes")
                entries: dict[str, Any] = json.loads(file.read(length))
            for stored, entry in entries.items():
                name = named(stored)
                if stored != "__metadata__" and name is not None:
                    found[name] = Header(str(entry["dtype"]), tuple(int(one) for one in entry["shape"]), path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ModelFilesError(f"{path} is not a safetensors file: {error}. Download it again.") from error
    return found
