"""A model of one GGUF file, or of the files into which it was split."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.errors import ModelFilesAway, ModelFilesError
from worker.repository.gguf.header import Header, StoredTensor, read_header
from worker.repository.gguf.values import Array

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
        sizes = {one.type.weights for name, one in self.tensors.items() if name.endswith(FEED_FORWARD)}
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

    def wrong(self, key: str, value: Any, needed: str) -> ModelFilesError:
        shown = "a list" if isinstance(value, Array) else repr(value)[:60]
        return ModelFilesError(f"{self.files[0]}: {key} is {shown}; {needed}. Convert or download the model again.")

    def _field(self, key: str, default: Any) -> Any:
        if key not in self.fields and default is _NEEDED:
            raise ModelFilesError(f"{self.files[0]} has no {key} in its metadata. Convert or download the model again.")
        return self.fields.get(key, default)


def split_files(path: Path) -> list[Path]:
    """All files of the model that `path` is a part of, in order, whether they exist or not."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_model(path: Path) -> GgufModel:
    """The model of `path`, one of its files. Raises ModelFilesError; ModelFilesAway naming missing files."""
    files = split_files(path)
    if path not in files:  # another case of `.gguf`, or a number beyond the count
        files = [path]
    if missing := [one.name for one in files if not one.is_file()]:
        raise ModelFilesAway(
            f"{path.parent} lacks {len(missing)} of the model's {len(files)} files: {', '.join(missing[:8])}"
            f"{' …' if len(missing) > 8 else ''}. Download what is missing."
        )
    headers = [read_header(one) for one in files]
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


def _check_parts(headers: list[Header]) -> None:
    """The numbers in the parts' metadata are those of their names, and no tensor is missing."""
    parts = len(headers)
    for number, header in enumerate(headers):
        given, count = header.fields.get("split.no", 0), header.fields.get("split.count", 0)
        if (parts == 1 and count in (0, 1)) or (given == number and count == parts):
            continue
        if parts == 1:
            raise ModelFilesError(
                f"{header.path} is a part of a model of {count} files, but its name does not say so. Give the parts "
                f"their names back, such as NAME-00001-of-{_shown(count):0>5}.gguf."
            )
        raise ModelFilesError(
            f"{header.path} is part {_shown(given)} (from 0) of {_shown(count)} by its metadata, and part {number} of "
            f"{parts} by its name. Download it again."
        )
    path, wanted = headers[0].path, headers[0].fields.get("split.tensors.count")
    found = sum(len(one.tensors) for one in headers)
    if parts > 1 and wanted is not None and wanted != found:
        raise ModelFilesError(f"{path} promises {_shown(wanted)} tensors in {parts} files, which have {found}.")


def _shown(value: Any) -> str:
    return "a list" if isinstance(value, Array) else str(value)[:20]
