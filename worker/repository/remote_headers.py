"""The headers of a repository of the hub, without its weights: small files as they are, and of each file of weights its
header in a file of the same size that is empty behind it and takes no memory on the disk."""

from __future__ import annotations

import struct
from pathlib import Path

from control.errors import HubUnreachable, ModelFilesError
from worker.repository.files import INDEX, SINGLE
from worker.repository.gguf.configuration import FACTORS
from worker.repository.gguf.selection import choose, is_model
from worker.repository.source import Hub, failed, reach, shards_of
from worker.weights.formats import StoredTensor
from worker.weights.gguf import read_header
from worker.weights.safetensors_header import HEADER_LIMIT

DESCRIPTIONS = ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
FIRST_BYTES = 2**17
"""Of a file: most headers of safetensors are shorter."""
MOST_GGUF_BYTES = 2**26
"""Vocabularies stand in a GGUF header."""
TIMEOUT_S = 30.0


def headers_of(repository: str, cache: Path, gguf: str | None = None) -> Path:
    """The folder or the GGUF file, as of a download to `cache`, which `inspect` reads. Raises ModelFilesError, and
    HubUnreachable where another try may help."""
    reach(repository, cache)
    hub = Hub(repository, "main", cache, lambda progress: None)
    config = None if gguf is not None else hub.fetch("config.json")
    index = None if config is None else hub.fetch(INDEX)
    names = [SINGLE] if index is None else shards_of(index, repository)
    if config is None or (index is None and _size(hub, SINGLE) is None):
        there = hub.names()
        if gguf is None and not any(map(is_model, there)):
            missing_file = "config.json" if config is None else SINGLE
            raise hub.missing(missing_file)
        parts = choose(there, gguf, f"Repository {repository}")
        folder = cache / "gguf"
        folder.mkdir()
        for name in parts:
            _gguf(hub, name, folder / Path(name).name)
        return folder / Path(parts[0]).name
    for name in names:
        _safetensors(hub, name, config.parent / name)
    hub.fetch_descriptions(DESCRIPTIONS)
    (config.parent / "tokenizer.json").write_text("{}")  # a need doesn't depend on it
    return config.parent


def _needed_size(hub: Hub, name: str) -> int:
    size = _size(hub, name)
    if size is None:
        raise hub.missing(name)
    return size


def _safetensors(hub: Hub, name: str, file: Path) -> None:
    size = _needed_size(hub, name)
    first = _read(hub, name, 0, min(size, FIRST_BYTES))
    length = 8 + struct.unpack("<Q", first[:8])[0] if len(first) >= 8 else size + 1
    if length > min(size, HEADER_LIMIT):
        raise ModelFilesError(f"{name} of {hub.repository} is not a safetensors file: its header has {length} bytes.")
    header = first if length <= len(first) else first + _read(hub, name, len(first), length)
    _write(file, header, size)


def _gguf(hub: Hub, name: str, file: Path) -> None:
    size = _needed_size(hub, name)
    content = b""
    while True:
        content += _read(hub, name, len(content), min(size, max(FIRST_BYTES, 2 * len(content))))
        _write(file, content, size)
        try:
            tensors = read_header(file).tensors
            if min((tensor.start for tensor in tensors.values()), default=size) <= len(content):
                _factors(hub, name, file, tensors.get(FACTORS))
                return
        except ModelFilesError:  # what is still empty is read as a part of the header
            if len(content) == size:
                raise
        if len(content) >= MOST_GGUF_BYTES:
            raise ModelFilesError(f"{name} of {hub.repository} has no end of its header in {MOST_GGUF_BYTES} bytes.")


def _factors(hub: Hub, name: str, file: Path, tensor: StoredTensor | None) -> None:
    """The one tensor that describes a model: some hundred numbers of its rotary embedding."""
    if tensor is None or tensor.bytes > FIRST_BYTES:
        return
    numbers = _read(hub, name, tensor.start, tensor.start + tensor.bytes)
    with file.open("r+b") as opened:
        opened.seek(tensor.start)
        opened.write(numbers)


def _write(file: Path, header: bytes, size: int) -> None:
    with file.open("wb") as opened:
        opened.write(header)
        opened.truncate(size)


def _size(hub: Hub, name: str) -> int | None:
    """The bytes of a file of the repository; None where it has none of that name."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        metadata = get_hf_file_metadata(hf_hub_url(hub.repository, name, revision=hub.revision), timeout=TIMEOUT_S)
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise failed(f"{name} of {hub.repository} could not be read", error) from error
    return metadata.size or 0


def _read(hub: Hub, name: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file; what a server sends beyond them is not read."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = {**build_hf_headers(), "range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
    content = bytearray()
    try:
        url = hf_hub_url(hub.repository, name, revision=hub.revision)
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
            hf_raise_for_status(response)
            skipped = 0 if response.status_code == 206 else start  # a server that knows no ranges begins at 0
            for piece in response.iter_bytes():
                content += piece
                if len(content) >= skipped + stop - start:
                    break
    except Exception as error:
        raise failed(f"{name} of {hub.repository} could not be read", error) from error
    part = bytes(content[skipped : skipped + stop - start])
    if len(part) < stop - start:
        raise HubUnreachable(f"{name} of {hub.repository} ended after {len(part)} of {stop - start} bytes.")
    return part
