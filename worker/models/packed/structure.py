"""A loaded module as bytes without its memory: the tensors stay apart, threads and group are those of the reader.

The form is pickle's, read with a list of permitted classes: nothing else in a file is imported or called.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from worker.layers.parallel import Link
from worker.native.library import Threads

THREADS, LINK, DTYPE = "threads", "link", "dtype "

CLASSES = ("worker.formats.", "worker.layers.", "worker.models.", "worker.native.", "torch.nn.modules.")
"""Prefixes of the modules whose classes may be read."""
OTHERS = {
    ("builtins", "list"),
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("functools", "partial"),
    ("types", "SimpleNamespace"),
    ("torch", "device"),
}


def method(owner: Any, name: str) -> Callable[..., Any]:
    """The method `name` of a module."""
    if not isinstance(owner, nn.Module) or name.startswith("_"):
        raise pickle.UnpicklingError(f"{name} of {type(owner).__name__} is no method of a module")
    return getattr(owner, name)


def taken_apart(contents: Any) -> tuple[bytes, list[Tensor]]:
    """`contents` without its memory, and its tensors. Raises PicklingError for an object of an unknown class."""
    buffer, tensors = io.BytesIO(), _Tensors()
    _Pickler(buffer, tensors).dump(contents)
    return buffer.getvalue(), tensors.all


def put_together(structure: bytes, tensors: Sequence[Tensor], threads: Threads, link: Link) -> Any:
    """The contents that `taken_apart` was given, over the memory of `tensors`. Raises UnpicklingError for a structure
    with an unknown class."""
    return _Unpickler(io.BytesIO(structure), tensors, {THREADS: threads, LINK: link}).load()


class _Tensors:
    """Tensors in the order in which they are met, each once."""

    def __init__(self) -> None:
        self.all: list[Tensor] = []
        self._index: dict[int, int] = {}

    def index(self, tensor: Tensor) -> int:
        if id(tensor) not in self._index:
            self._index[id(tensor)] = len(self.all)
            self.all.append(tensor)
        return self._index[id(tensor)]


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(buffer, protocol=5)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return self._tensors.index(obj)
        if isinstance(obj, torch.dtype):  # pickle would look for its name in all modules
            return DTYPE + str(obj).removeprefix("torch.")
        if isinstance(obj, Threads):
            return THREADS
        return LINK if isinstance(obj, Link) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, MethodType):
            return method, (obj.__self__, obj.__name__)
        known = obj is method or (isinstance(obj, type) and _permitted(obj.__module__, obj.__qualname__))
        if isinstance(obj, type | FunctionType) and not known:
            raise pickle.PicklingError(f"{obj.__module__}.{obj.__qualname__} is kept in no file")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: Sequence[Tensor], others: dict[str, Any]) -> None:
        super().__init__(buffer)
        self._tensors, self._others = tensors, others

    def persistent_load(self, pid: Any) -> Any:
        if isinstance(pid, int):
            return self._tensors[pid]
        if isinstance(pid, str) and pid.startswith(DTYPE):
            return dtype_of(pid.removeprefix(DTYPE))
        return self._others[pid]

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == (__name__, method.__name__):
            return method
        if not _permitted(module_name, global_name):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} belongs in no file")
        found = super().find_class(module_name, global_name)
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no class")
        return found


def dtype_of(name: str) -> torch.dtype:
    """The type `name`, without "torch.". Raises UnpicklingError for another word."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise pickle.UnpicklingError(f"{name!r} is no type of numbers")
    return found


def _permitted(module: str, name: str) -> bool:
    return (module, name) in OTHERS or (module.startswith(CLASSES) and "." not in name)
