"""Values of GGUF metadata, read from a mapped file behind a check of every length."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.errors import ModelFilesAway, ModelFilesError

HEADER_LIMIT = 2**28
"""Bytes at the beginning of a file that a header may take: a vocabulary of 262,144 takes 15 MB."""
STRING, ARRAY, BOOL = 8, 9, 7
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
"""struct's letters by GGUF's numbers of types; a bool is a byte."""
_LENGTH = struct.Struct("<Q")


class Cursor:
    """A place in a header. Each method moves it, or raises ModelFilesError that says `what` could not be read."""

    def __init__(self, data: bytes | mmap.mmap, path: Path, position: int) -> None:
        self.data, self.path, self.position = data, path, position
        self.size = len(data)
        self._limit = min(self.size, HEADER_LIMIT)

    def take(self, count: int, what: str) -> int:
        """The beginning of the next `count` bytes."""
        start = self.position
        if count > self._limit - start:
            kind = ModelFilesAway if self._limit == self.size else ModelFilesError
            whose = "the file" if self._limit == self.size else "a header"
            raise kind(
                f"{self.path} is cut short or damaged: {what} would end at byte {start + count}, and {whose} has at "
                f"most {self._limit}. Download it again."
            )
        self.position = start + count
        return start

    def numbers(self, form: str, what: str) -> tuple[Any, ...]:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), what))

    def number(self, form: str, what: str) -> Any:
        return self.numbers(form, what)[0]

    def fitting(self, count: int, least: int, what: str) -> int:
        """`count`, if so many things of at least `least` bytes fit into the rest."""
        if count * least > self._limit - self.position:
            raise ModelFilesAway(
                f"{self.path} is cut short or damaged: its header promises {count} {what}, and only "
                f"{self._limit - self.position} bytes are left. Download it again."
            )
        return count

    def text(self, what: str, limit: int = HEADER_LIMIT) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > limit:
            raise ModelFilesError(f"{self.path}: {what} is {length} bytes long; at most {limit} are possible.")
        start = self.take(length, what)
        try:
            return bytes(self.data[start : start + length]).decode()
        except UnicodeDecodeError as error:
            raise ModelFilesError(f"{self.path}: {what} is no UTF-8: {error}. Convert the model again.") from error

    def skip_texts(self, count: int, what: str) -> None:
        """Go past `count` strings."""
        data, position, limit, read = self.data, self.position, self._limit - 8, _LENGTH.unpack_from
        for index in range(self.fitting(count, 8, f"items of {what}")):
            length = read(data, position)[0] if position <= limit else limit
            if length > limit - position:
                self.position = position
                self.take(8 + length, f"item {index} of {what}")
            position += 8 + length
        self.position = position


@dataclass(frozen=True, slots=True)
class Array:
    """A list of metadata that stays in the file until it is asked for. `kind` is GGUF's number of the items' type."""

    data: bytes | mmap.mmap
    path: Path
    key: str
    kind: int
    count: int
    start: int

    def __len__(self) -> int:
        return self.count

    def texts(self) -> list[str]:
        """Raises ModelFilesError for items that are no strings of UTF-8."""
        if self.kind != STRING:
            raise ModelFilesError(f"{self.path}: {self.key} is a list of numbers, and one of strings is needed.")
        data, position, read, found = self.data, self.start, _LENGTH.unpack_from, list[str]()
        try:
            for _ in range(self.count):
                begin = position + 8
                position = begin + read(data, position)[0]
                found.append(str(data[begin:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise ModelFilesError(f"{self.path}: item {len(found)} of {self.key} is no UTF-8: {error}.") from error
        return found

    def numbers(self) -> list[Any]:
        """Raises ModelFilesError for strings."""
        if self.kind == STRING:
            raise ModelFilesError(f"{self.path}: {self.key} is a list of strings, and one of numbers is needed.")
        return list(struct.unpack_from(f"<{self.count}{FORMATS[self.kind]}", self.data, self.start))


def read_value(cursor: Cursor, key: str) -> Any:
    """The next value: a number, a bool, a string, or an Array."""
    kind = cursor.number("<I", f"the type of {key}")
    if kind == STRING:
        return cursor.text(key)
    if kind == ARRAY:
        return _array(cursor, key)
    if kind not in FORMATS:
        raise ModelFilesError(f"{cursor.path}: {key} has the unknown type {kind}. Download or convert the model again.")
    value = cursor.number(f"<{FORMATS[kind]}", key)
    if kind != BOOL:
        return value
    if value > 1:
        raise ModelFilesError(f"{cursor.path}: {key} is a bool with the value {value}; 0 and 1 are possible.")
    return bool(value)


def _array(cursor: Cursor, key: str) -> Array:
    kind, count = cursor.number("<I", f"the type of the items of {key}"), cursor.number("<Q", f"the length of {key}")
    if kind not in FORMATS and kind != STRING:
        what = "lists" if kind == ARRAY else f"the unknown type {kind}"
        raise ModelFilesError(f"{cursor.path}: {key} is a list of {what}, which GGUF models don't have.")
    start = cursor.position
    if kind == STRING:
        cursor.skip_texts(count, key)
    else:
        cursor.take(count * struct.calcsize(f"<{FORMATS[kind]}"), f"the {count} items of {key}")
    return Array(cursor.data, cursor.path, key, kind, count, start)
