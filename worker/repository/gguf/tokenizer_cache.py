"""Converted tokenizers, kept in the user's cache: that of 262,144 tokens takes three seconds to make."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog
import tokenizers

from control import cache as cache_files
from control.errors import ModelFilesAway
from worker.repository.gguf.tokenizer import read_tokenizer
from worker.weights import gguf
from worker.weights.gguf import GgufModel

log = structlog.get_logger()

KIND = "tokenizers"
LEAST_TOKENS = 16_384
"""Tokens from which on reading a file saves time worth it."""
MOST_BYTES, SPARE_BYTES = 2**28, 2**30
"""Limit of all files together, and bytes of the disk that are left free."""


class Converted(msgspec.Struct, frozen=True):
    """The outcome of `read_tokenizer`."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    ends: list[int]


Read = Callable[[GgufModel], tuple[str, dict[str, Any], list[int]]]


def cached_tokenizer(model: GgufModel, read: Read = read_tokenizer) -> Converted:
    """The file's tokenizer: from the cache, else by `read`. The key is all of the file but its weights, and the code
    that converts. Raises ModelFilesError, ModelFilesAway where the file went away."""
    if len(model.array("tokenizer.ggml.tokens")) < LEAST_TOKENS:
        return Converted(*read(model))
    try:
        path = cache_files.folder(KIND) / f"{_key(model)}.tokenizer"
    except OSError as error:
        raise ModelFilesAway(f"{model.files[0]} can't be read: {error}. Repair the file system.") from error
    if (converted := _read(path)) is not None:
        return converted
    made = Converted(*read(model))
    with contextlib.suppress(OSError):  # a home that can't be written to: converted at each start
        _keep(path, made)
    return made


def _key(model: GgufModel) -> str:
    first = model.files[0]
    starts = [tensor.start for tensor in model.tensors.values() if tensor.path == first]
    digest = hashlib.sha256(tokenizers.__version__.encode())
    for source in (*sorted(Path(__file__).parent.glob("*.py")), Path(gguf.__file__)):
        digest.update(source.read_bytes())
    with first.open("rb") as file:
        digest.update(file.read(min(starts, default=-1)))
    return digest.hexdigest()[:24]


def _read(path: Path) -> Converted | None:
    try:
        checksum, content = path.read_bytes().split(b"\n", 1)
        if hashlib.sha256(content).hexdigest().encode() != checksum:
            raise ValueError("its checksum differs")
        converted = msgspec.msgpack.decode(content, type=Converted)
    except OSError:
        return None
    except (ValueError, msgspec.DecodeError) as error:
        log.warning("a kept tokenizer is damaged", file=str(path), reason=str(error), action="read_tokenizer")
        return None
    cache_files.mark_used(path)
    return converted


def _keep(path: Path, made: Converted) -> None:
    content = msgspec.msgpack.encode(made)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not cache_files.make_room(KIND, len(content), MOST_BYTES, SPARE_BYTES):
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="write-", delete=False) as fresh:
        try:
            fresh.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
            fresh.flush()
            Path(fresh.name).replace(path)  # whole or not at all, however many write it
        except BaseException:
            Path(fresh.name).unlink(missing_ok=True)
            raise
