"""A file of packed weights: a header, the structure of a module, and the memory of its tensors.

    magic (8 bytes) | length of the header (8) | CRC-32 of the header (4) | header (JSON) | structure | tensors

Tensors begin at borders of PAGE bytes and each at one of ALIGNMENT bytes within. Every byte but the gaps between
tensors is covered by a CRC-32.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
import torch
from torch import Tensor, nn

from worker.models.packed.structure import dtype_of
from worker.models.packed.subject import Subject
from worker.native.zeros import large_pages

MAGIC = b"FURROW\x00\x01"
_HEAD = struct.Struct("<8sQI")
LONGEST_HEADER = 2**30
PAGE, ALIGNMENT = 4096, 64
PIECE = 4 * 2**20
"""Bytes that are read and checked at once: they are still in the processor's cache when they are checked."""


class Damaged(Exception):
    """A file does not hold what its name says; the message says how that was seen."""


class Stored(msgspec.Struct, frozen=True):
    """A tensor: its bytes begin `offset` bytes behind the first tensor. `sums` are CRC-32s of its pieces."""

    dtype: str
    shape: tuple[int, ...]
    parameter: bool
    offset: int
    sums: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize


class Header(msgspec.Struct, frozen=True):
    subject: Subject
    structure_bytes: int
    structure_sum: int
    tensor_bytes: int
    tensors: tuple[Stored, ...]


def file_bytes(structure: bytes, tensors: list[Tensor]) -> int:
    """About the size of a file."""
    return len(structure) + sum(tensor.nbytes + ALIGNMENT for tensor in tensors) + PAGE


def write(file: BinaryIO, subject: Subject, structure: bytes, tensors: list[Tensor]) -> None:
    """Raises OSError."""
    stored, end = list[Stored](), 0
    for tensor in tensors:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        sums = tuple(zlib.crc32(piece) for piece in _pieces(tensor))
        name = str(tensor.dtype).removeprefix("torch.")
        stored.append(Stored(name, tuple(tensor.shape), isinstance(tensor, nn.Parameter), begin, sums))
        end = begin + tensor.nbytes
    header = msgspec.json.encode(Header(subject, len(structure), zlib.crc32(structure), end, tuple(stored)))
    file.write(_HEAD.pack(MAGIC, len(header), zlib.crc32(header)) + header + structure)
    begin = _border(len(header), len(structure))
    for one, tensor in zip(stored, tensors, strict=True):
        file.seek(begin + one.offset)
        for piece in _pieces(tensor):
            file.write(piece)
    file.truncate(begin + end)


def read(path: Path, subject: Subject, tell: Callable[[float], None], threads: int) -> tuple[bytes, list[Tensor]]:
    """The structure, and the tensors, which share one piece of memory. `tell` is called with the share that was read.
    Raises OSError, and Damaged for a file that is not `subject`'s or not whole."""
    with path.open("rb") as file:
        header, length = _header(file)
        if header.subject != subject:
            raise Damaged("it holds another model's weights")
        begin = _border(length, header.structure_bytes)
        size = os.fstat(file.fileno()).st_size
        if size != begin + header.tensor_bytes:
            raise Damaged(f"it has {size} bytes, and {begin + header.tensor_bytes} are announced")
        _check_places(header)
        structure = file.read(header.structure_bytes)
        if len(structure) != header.structure_bytes or zlib.crc32(structure) != header.structure_sum:
            raise Damaged("the checksum of its structure is wrong")
        memory = large_pages(header.tensor_bytes)
        _read_all(file.fileno(), begin, header, memory, tell, threads)
    return structure, [_tensor(one, memory) for one in header.tensors]


def _header(file: BinaryIO) -> tuple[Header, int]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise Damaged(f"it has {len(head)} bytes")
    magic, length, expected = _HEAD.unpack(head)
    if magic != MAGIC or length > LONGEST_HEADER:
        raise Damaged("it is no file of packed weights, or of another version")
    data = file.read(length)
    if len(data) != length or zlib.crc32(data) != expected:
        raise Damaged("the checksum of its header is wrong")
    try:
        return msgspec.json.decode(data, type=Header), length
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"its header can't be read: {error}") from error


def _check_places(header: Header) -> None:
    for one in header.tensors:
        inside = one.offset >= 0 and one.offset + one.bytes <= header.tensor_bytes and one.offset % ALIGNMENT == 0
        if not inside or len(one.sums) != -(-one.bytes // PIECE) or min(one.shape, default=0) < 0:
            raise Damaged("the place of a tensor is wrong")


def _read_all(
    file: int, begin: int, header: Header, memory: Tensor, tell: Callable[[float], None], threads: int
) -> None:
    """Read and check every piece into `memory`, by several threads: reading and checking leave the interpreter free."""
    room = memoryview(cast("Any", memory.numpy()))

    def fill(start: int, stop: int, expected: int) -> int:
        place, at = room[start:stop], 0
        while at < len(place):
            count = os.preadv(file, [place[at:]], begin + start + at)
            if not count:
                raise Damaged("it is shorter than announced")
            at += count
        if zlib.crc32(place) != expected:
            raise Damaged(f"the checksum of the {stop - start} bytes from {begin + start} on is wrong")
        return stop - start

    done = 0
    with ThreadPoolExecutor(max(1, threads), "read-weights") as pool:
        parts = [pool.submit(fill, *piece) for one in header.tensors for piece in _places(one)]
        try:
            for part in as_completed(parts):
                done += part.result()
                tell(done / max(1, header.tensor_bytes))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _places(one: Stored) -> Iterator[tuple[int, int, int]]:
    for index, expected in enumerate(one.sums):
        start = one.offset + index * PIECE
        yield start, min(start + PIECE, one.offset + one.bytes), expected


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    if tensor.nbytes:
        data: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), PIECE):
            yield memoryview(data[start : start + PIECE])


def _tensor(one: Stored, memory: Tensor) -> Tensor:
    tensor = memory[one.offset : one.offset + one.bytes].view(dtype_of(one.dtype)).view(one.shape)
    return nn.Parameter(tensor, requires_grad=False) if one.parameter else tensor


def _border(header: int, structure: int) -> int:
    """The place of the first tensor in a file."""
    return -(-(_HEAD.size + header + structure) // PAGE) * PAGE
