"""GGUF files: values, header and the table of tensors of a file, and the model of one file or of several; no torch.

Every count, length and offset is compared with the file before it is used, so a damaged header costs no memory. The
format is that of github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.errors import ModelFilesAway, ModelFilesError, UnsupportedArchitecture
from worker.families.family import Family
from worker.families.gguf import FACTORS, Gguf
from worker.families.registry import GGUF_ARCHITECTURES
from worker.weights.formats import REFUSED_TYPES, TENSOR_TYPES, StoredTensor, TensorType, check_apart

HEADER_LIMIT = 2**28
"""Bytes at the beginning of a file that a header may take: a vocabulary of 262,144 takes 15 MB."""
STRING = 8
ARRAY = 9
BOOL = 7
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B", 10: "Q", 11: "q", 12: "d"}
"""struct's letters by GGUF's numbers of types; a bool is a byte."""
_LENGTH = struct.Struct("<Q")


class Cursor:
    """A place in a header. Each method moves it, or raises ModelFilesError that says `subject` could not be read."""

    def __init__(self, data: bytes | mmap.mmap, path: Path, position: int) -> None:
        self.data = data
        self.path = path
        self.position = position
        self.size = len(data)
        self._limit = min(self.size, HEADER_LIMIT)

    def take(self, count: int, subject: str) -> int:
        """The beginning of the next `count` bytes."""
        start = self.position
        if count > self._limit - start:
            kind = ModelFilesAway if self._limit == self.size else ModelFilesError
            whose = "the file" if self._limit == self.size else "a header"
            raise kind(
                f"{self.path} is cut short or damaged: {subject} would end at byte {start + count}, and {whose} has at "
                f"most {self._limit}. Download it again."
            )
        self.position = start + count
        return start

    def numbers(self, form: str, subject: str) -> tuple[Any, ...]:
        return struct.unpack_from(form, self.data, self.take(struct.calcsize(form), subject))

    def number(self, form: str, subject: str) -> Any:
        return self.numbers(form, subject)[0]

    def fitting(self, count: int, least: int, subject: str) -> int:
        """`count`, if so many things of at least `least` bytes fit into the rest."""
        if count * least > self._limit - self.position:
            raise ModelFilesAway(
                f"{self.path} is cut short or damaged: its header promises {count} {subject}, and only "
                f"{self._limit - self.position} bytes are left. Download it again."
            )
        return count

    def text(self, subject: str, limit: int = HEADER_LIMIT) -> str:
        length = self.number("<Q", f"the length of {subject}")
        if length > limit:
            raise ModelFilesError(f"{self.path}: {subject} is {length} bytes long; at most {limit} are possible.")
        start = self.take(length, subject)
        try:
            return bytes(self.data[start : start + length]).decode()
        except UnicodeDecodeError as error:
            raise ModelFilesError(f"{self.path}: {subject} is no UTF-8: {error}. Convert the model again.") from error

    def skip_texts(self, count: int, subject: str) -> None:
        """Go past `count` strings."""
        data = self.data
        position = self.position
        limit = self._limit - 8
        read = _LENGTH.unpack_from
        for index in range(self.fitting(count, 8, f"items of {subject}")):
            length = read(data, position)[0] if position <= limit else limit
            if length > limit - position:
                self.position = position
                self.take(8 + length, f"item {index} of {subject}")
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
        data = self.data
        position = self.start
        read = _LENGTH.unpack_from
        texts = list[str]()
        try:
            for _ in range(self.count):
                begin = position + 8
                position = begin + read(data, position)[0]
                texts.append(str(data[begin:position], "utf-8"))
        except UnicodeDecodeError as error:
            raise ModelFilesError(f"{self.path}: item {len(texts)} of {self.key} is no UTF-8: {error}.") from error
        return texts

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
    kind = cursor.number("<I", f"the type of the items of {key}")
    count = cursor.number("<Q", f"the length of {key}")
    if kind not in FORMATS and kind != STRING:
        element = "lists" if kind == ARRAY else f"the unknown type {kind}"
        raise ModelFilesError(f"{cursor.path}: {key} is a list of {element}, which GGUF models don't have.")
    start = cursor.position
    if kind == STRING:
        cursor.skip_texts(count, key)
    else:
        cursor.take(count * struct.calcsize(f"<{FORMATS[kind]}"), f"the {count} items of {key}")
    return Array(cursor.data, cursor.path, key, kind, count, start)


MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME = 64
"""Bytes of a tensor's name, as in llama.cpp."""
MAX_KEY = 65535
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**20
_TENSOR_END = struct.Struct("<IQ")


@dataclass(frozen=True)
class GgufHeader:
    """The metadata, a value or an Array by key, and the tensors by name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> GgufHeader:
    """Raises ModelFilesError naming file, field or tensor, and value."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelFilesAway(f"{path} is cut short: a GGUF header takes 24 bytes, and it has {size}.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFilesAway(f"{path} can't be read: {error}. Repair the file system.") from error
    return parse(mapped, path)


def parse(data: bytes | mmap.mmap, path: Path) -> GgufHeader:
    """The header of a file whose content is `data`; arrays are read from `data` when they are asked for."""
    if data[:4] != MAGIC:
        raise ModelFilesError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not {MAGIC!r}.")
    cursor = Cursor(data, path, 4)
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        fault = "is big-endian" if swapped in VERSIONS else f"has version {version}"
        raise ModelFilesError(f"{path} {fault}; little-endian GGUF of version 2 or 3 is read. Convert the model again.")
    tensor_count = cursor.number("<Q", "the tensor count")
    field_count = cursor.number("<Q", "the field count")
    fields = _fields(cursor, field_count)
    tensors = _tensors(cursor, tensor_count, _alignment(path, fields))
    return GgufHeader(path, fields, tensors)


def _fields(cursor: Cursor, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for index in range(cursor.fitting(count, 13, "metadata fields")):
        key = cursor.text(f"the key of field {index}", MAX_KEY)
        if key in fields:
            raise ModelFilesError(f"{cursor.path} has the field {key} twice. Download or convert it again.")
        fields[key] = read_value(cursor, key)
    return fields


def _alignment(path: Path, fields: dict[str, Any]) -> int:
    alignment = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or isinstance(alignment, bool)
        or not 0 < alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        shown = "an array" if isinstance(alignment, Array) else repr(alignment)[:40]
        raise ModelFilesError(f"{path}: general.alignment is {shown}; a power of two up to {MAX_ALIGNMENT} is needed.")
    return alignment


def _tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    path = cursor.path
    relative = dict[str, tuple[TensorType, tuple[int, ...], int]]()
    for index in range(cursor.fitting(count, 32, "tensors")):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME)
        if name in relative:
            raise ModelFilesError(f"{path} has the tensor {name} twice. Download or convert it again.")
        relative[name] = _tensor(cursor, name)
    begin = cursor.position + -cursor.position % alignment
    tensors: dict[str, StoredTensor] = {}
    for name, (kind, shape, offset) in relative.items():
        if offset % alignment:
            raise ModelFilesError(f"{path}: tensor {name} begins at {offset}, no multiple of {alignment}.")
        size = kind.bytes_of(shape)
        if begin + offset + size > cursor.size:
            raise ModelFilesAway(
                f"{path} is cut short or damaged: tensor {name} of shape {shape} ends at byte {begin + offset + size}, "
                f"and the file has {cursor.size}. Download it again."
            )
        tensors[name] = StoredTensor(path, kind, shape, begin + offset, size)
    check_apart(path, tensors)
    return tensors


def _tensor(cursor: Cursor, name: str) -> tuple[TensorType, tuple[int, ...], int]:
    path = cursor.path
    rank = cursor.number("<I", f"the number of dimensions of tensor {name}")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise ModelFilesError(f"{path}: tensor {name} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are possible.")
    shape = cursor.numbers(f"<{rank}Q", f"the dimensions of tensor {name}")[::-1]
    number, offset = cursor.numbers(_TENSOR_END.format, f"type and offset of tensor {name}")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise ModelFilesError(
            f"{path}: tensor {name} has type {REFUSED_TYPES.get(number, number)}, which is not supported. "
            f"Use a file of {', '.join(tensor_type.name.upper() for tensor_type in TENSOR_TYPES.values())}."
        )
    if 0 in shape:
        raise ModelFilesError(f"{path}: tensor {name} has the shape {shape}, with a dimension of 0.")
    if shape[-1] % kind.weights:
        raise ModelFilesError(
            f"{path}: tensor {name} has rows of {shape[-1]} weights, no multiple of the {kind.weights} in a block of "
            f"{kind.name.upper()}."
        )
    return kind, shape, offset


SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
FEED_FORWARD = ("ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
"""Tensors whose inputs are the inner widths of feed-forward networks."""
_NEEDED = object()


@dataclass(frozen=True)
class GgufModel:
    """`files` in order; `fields` are the first file's, `tensors` those of all."""

    files: list[Path]
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    @property
    def borders(self) -> tuple[int, ...]:
        """The sizes of the blocks of feed-forward tensors, at whose multiples the ranks' shares end; the largest
        first."""
        sizes = {tensor.type.weights for name, tensor in self.tensors.items() if name.endswith(FEED_FORWARD)}
        return tuple(sorted(sizes - {1}, reverse=True))

    def whole(self, key: str, default: Any = _NEEDED, least: int = 1) -> Any:
        """A whole number of at least `least`; a list of equal ones counts as one. `default` where there is none."""
        value = self._field(key, default)
        if value is default:
            return default
        if isinstance(value, Array):
            different = set(value.numbers())
            value = different.pop() if len(different) == 1 else sorted(different)[:4]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise self.wrong(key, value, f"a whole number from {least} on is needed")
        return value

    def numbers(self, key: str, default: int) -> list[int]:
        """Whole numbers of layers, or the one for all of them; `default` where there is none."""
        value = self._field(key, default)
        if not isinstance(value, Array):
            return [self.whole(key, default)]
        numbers = value.numbers()
        if not numbers or not all(isinstance(number, int) and 0 <= number < 2**31 for number in numbers):
            raise self.wrong(key, value, "whole numbers are needed")
        return numbers

    def real(self, key: str, default: Any = _NEEDED) -> Any:
        """A finite number above 0."""
        value = self._field(key, default)
        if value is default:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not (math.isfinite(value) and value > 0):
            raise self.wrong(key, value, "a number above 0 is needed")
        return float(value)

    def text(self, key: str, default: Any = _NEEDED) -> Any:
        value = self._field(key, default)
        if value is not default and not isinstance(value, str):
            raise self.wrong(key, value, "a text is needed")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._field(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false is needed")
        return value

    def array(self, key: str) -> Array:
        value = self._field(key, _NEEDED)
        if not isinstance(value, Array):
            raise self.wrong(key, value, "a list is needed")
        return value

    def factors(self, width: int) -> tuple[float, ...]:
        """By how much each frequency of heads that are `width` wide is divided. Raises ModelFilesError."""
        stored = self.tensors.get(FACTORS)
        if stored is None or stored.type.name != "f32" or stored.shape != (width // 2,):
            raise self.wrong(FACTORS, stored and (stored.type.name, stored.shape), f"{width // 2} of F32 are needed")
        with stored.path.open("rb") as file:
            file.seek(stored.start)
            factors = struct.unpack(f"<{width // 2}f", file.read(stored.bytes))
        if not all(0 < factor < math.inf for factor in factors):
            raise self.wrong(FACTORS, factors[:8], "finite numbers above 0 are needed")
        return factors

    def wrong(self, key: str, value: Any, needed: str) -> ModelFilesError:
        shown = "a list" if isinstance(value, Array) else repr(value)[:60]
        return ModelFilesError(f"{self.files[0]}: {key} is {shown}; {needed}. Convert or download the model again.")

    def _field(self, key: str, default: Any) -> Any:
        if key not in self.fields and default is _NEEDED:
            raise ModelFilesError(f"{self.files[0]} has no {key} in its metadata. Convert or download the model again.")
        return self.fields.get(key, default)


def architecture_of(model: GgufModel) -> tuple[Family, Gguf]:
    """The record of the model's type, and that of its architecture. Raises UnsupportedArchitecture listing what is
    served."""
    name = model.architecture
    if name not in GGUF_ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{model.files[0]}: architecture '{name[:60]}' is not supported from GGUF files. "
            f"Supported: {', '.join(sorted(GGUF_ARCHITECTURES))}."
        )
    return next(pair for pair in GGUF_ARCHITECTURES[name] if pair[1].when is None or pair[1].when(model))


def split_files(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of, in order, whether they exist or not."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_model(path: Path) -> GgufModel:
    """The model of `path`, one of its files. Raises ModelFilesError; ModelFilesAway naming missing files."""
    files = split_files(path)
    if path not in files:  # another case of `.gguf`, or a number beyond the count
        files = [path]
    if lacking := [file.name for file in files if not file.is_file()]:
        raise ModelFilesAway(
            f"{path.parent} lacks {len(lacking)} of the model's {len(files)} files: {', '.join(lacking[:8])}"
            f"{' …' if len(lacking) > 8 else ''}. Download what is missing."
        )
    headers = [read_header(file) for file in files]
    first = headers[0]
    _check_parts(headers)
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise ModelFilesError(
                f"{header.path} has the tensor {twice}, which {tensors[twice].path.name} has as well."
            )
        tensors |= header.tensors
    return GgufModel(files, first.fields, tensors)


def _check_parts(headers: list[GgufHeader]) -> None:
    """The numbers in the parts' metadata are those of their names, and no tensor is missing."""
    parts = len(headers)
    for number, header in enumerate(headers):
        index = header.fields.get("split.no", 0)
        count = header.fields.get("split.count", 0)
        if (parts == 1 and count in (0, 1)) or (index == number and count == parts):
            continue
        if parts == 1:
            raise ModelFilesError(
                f"{header.path} is a part of a model of {count} files, but its name does not say so. Give the parts "
                f"their names back, such as NAME-00001-of-{_shown(count):0>5}.gguf."
            )
        raise ModelFilesError(
            f"{header.path} is part {_shown(index)} (from 0) of {_shown(count)} by its metadata, and part {number} of "
            f"{parts} by its name. Download it again."
        )
    path = headers[0].path
    promised = headers[0].fields.get("split.tensors.count")
    present = sum(len(header.tensors) for header in headers)
    if parts > 1 and promised is not None and promised != present:
        raise ModelFilesError(f"{path} promises {_shown(promised)} tensors in {parts} files, which have {present}.")


def _shown(value: Any) -> str:
    return "a list" if isinstance(value, Array) else str(value)[:20]
