"""A loaded module as JSON without its memory: the arrays stay apart, threads and group are those of the reader.

An object is its class, which must be on the list, and its state; reading sets attributes and calls no constructor. A
value that JSON has is itself, all others are a list `[kind, …]`. An object that is met again is a reference to the
first one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from types import MethodType, SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from numpy.typing import NDArray

from worker.collective.base import Link
from worker.native.library import Threads

CLASSES = (
    "worker.families.",
    "worker.models.",
    "worker.native.",
    "worker.weights.",
)
"""Prefixes of the modules whose classes may be read."""
PLAIN = (type(None), bool, int, str)
OTHERS: dict[str, type] = {"list": list, "SimpleNamespace": SimpleNamespace}
"""Other classes, by name."""
Kind = Callable[[Any], Any]
NUMBERS: dict[str, np.dtype[Any]] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in (
        *(np.float64, np.float32, np.float16, bfloat16, float8_e4m3fn, float8_e5m2),
        *(np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8, np.bool_),
    )
}
"""The types of arrays that are kept, by name."""


class Unknown(Exception):
    """A structure has something that is on no list; the message names it."""


def taken_apart(contents: Any) -> tuple[bytes, list[NDArray[Any]]]:
    """`contents` without its memory, and its arrays. Raises Unknown for an object of an unknown class."""
    writer = _Writer()
    return msgspec.json.encode(writer.node(contents)), writer.arrays


def put_together(structure: bytes, arrays: Sequence[NDArray[Any]], threads: Threads, link: Link) -> Any:
    """The contents that `taken_apart` was given, over the memory of `arrays`. Raises Unknown for a structure with an
    unknown class, or one that it did not write."""
    try:
        return _Reader(arrays, threads, link).value(msgspec.json.decode(structure))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, ImportError) as error:
        raise Unknown(f"its structure can't be read: {type(error).__name__}: {error}") from error


def dtype_of(name: str) -> np.dtype[Any]:
    """The type `name` of NUMBERS. Raises Unknown for another word."""
    if name not in NUMBERS:
        raise Unknown(f"{name!r} is no type of numbers")
    return NUMBERS[name]


class _Writer:
    def __init__(self) -> None:
        self.arrays: list[NDArray[Any]] = []
        self._met: dict[int, tuple[int, Any]] = {}
        """By address: an object's number, and the object, so that no other one gets its address."""

    def node(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return value
        match value:
            case float():
                return ["float", value.hex()]
            case Threads() | Link():
                return ["threads" if isinstance(value, Threads) else "link"]
            case np.dtype():
                return ["dtype", dtype_of(value.name).name]
            case type():
                return ["class", *_name(value)]
            case MethodType():
                return ["method", self.node(value.__self__), value.__name__]
            case _:
                return self._object(value)

    def _object(self, value: Any) -> Any:
        if id(value) in self._met:
            return ["met", self._met[id(value)][0]]
        number = len(self._met)
        self._met[id(value)] = number, value
        if isinstance(value, np.ndarray):
            dtype_of(value.dtype.name)
            self.arrays.append(value)
            return ["array", number, len(self.arrays) - 1]
        if type(value) in (list, tuple, set, frozenset):
            return [type(value).__name__, number, [self.node(element) for element in value]]
        if type(value) in (dict, OrderedDict, defaultdict):
            factory = self.node(getattr(value, "default_factory", None))
            return [
                type(value).__name__,
                number,
                factory,
                [[self.node(key), self.node(element)] for key, element in value.items()],
            ]
        if type(value) is partial:
            return ["partial", number, self.node(value.func), self.node(value.args), self.node(value.keywords)]
        return ["object", number, _name(type(value)), self.node(value.__getstate__())]


class _Reader:
    def __init__(self, arrays: Sequence[NDArray[Any]], threads: Threads, link: Link) -> None:
        self._arrays = arrays
        self._met = dict[int, Any]()
        self._kinds: dict[str, Callable[..., Any]] = {
            "float": float.fromhex,
            "threads": lambda: threads,
            "link": lambda: link,
            "dtype": dtype_of,
            "class": _class,
            "method": self._method,
            "met": self._met.__getitem__,
            "array": self._array,
            "list": self._list,
            "object": self._object,
            "partial": self._partial,
            **{kind.__name__: partial(self._many, kind) for kind in (tuple, set, frozenset)},
            **{kind.__name__: partial(self._mapping, kind) for kind in (dict, OrderedDict, defaultdict)},
        }

    def value(self, node: Any) -> Any:
        if type(node) in PLAIN:
            return node
        kind, *parts = node
        return self._kinds[kind](*parts)

    def _keep(self, number: int, value: Any) -> Any:
        self._met[number] = value
        return value

    def _array(self, number: int, index: int) -> NDArray[Any]:
        return self._keep(number, self._arrays[index])

    def _list(self, number: int, nodes: list[Any]) -> list[Any]:
        items = self._keep(number, list[Any]())
        items.extend(self.value(node) for node in nodes)
        return items

    def _many(self, kind: Kind, number: int, nodes: list[Any]) -> Any:
        return self._keep(number, kind(self.value(node) for node in nodes))

    def _mapping(self, kind: type, number: int, factory: Any, nodes: list[Any]) -> Any:
        mapping = self._keep(number, defaultdict(self.value(factory)) if kind is defaultdict else kind())
        mapping.update((self.value(key), self.value(node)) for key, node in nodes)
        return mapping

    def _partial(self, number: int, function: Any, arguments: Any, keywords: Any) -> Any:
        function = self.value(function)
        return self._keep(number, partial(function, *self.value(arguments), **self.value(keywords)))

    def _method(self, owner: Any, name: str) -> Any:
        owner = self.value(owner)
        method = None if name.startswith("_") else getattr(owner, name)
        if not isinstance(method, MethodType) or not type(owner).__module__.startswith(CLASSES):
            raise Unknown(f"{name} of {type(owner).__name__} is no method of a module")
        return method

    def _object(self, number: int, name: list[str], state: Any) -> Any:
        kind: Any = _class(*name)
        instance = self._keep(number, kind.__new__(kind))
        state = self.value(state)
        if hasattr(instance, "__setstate__"):
            instance.__setstate__(state)
            return instance
        attributes, slots = cast("tuple[Any, Any]", state if isinstance(state, tuple) else (state, None))
        for key, node in [*(attributes or {}).items(), *(slots or {}).items()]:
            object.__setattr__(instance, key, node)
        return instance


def _name(kind: type) -> list[str]:
    """The module and the name of a class. Raises Unknown for one that is kept in no file."""
    module, name = ("", kind.__name__) if OTHERS.get(kind.__name__) is kind else (kind.__module__, kind.__qualname__)
    _class(module, name)
    return [module, name]


def _class(module: str, name: str) -> type:
    """The class `name` that `module` defines. Raises Unknown for one that is not on the list."""
    kind = OTHERS.get(name)
    if module:
        kind = vars(import_module(module)).get(name) if module.startswith(CLASSES) else None
    if not isinstance(kind, type) or (module and kind.__module__ != module):
        raise Unknown(f"{module}.{name} is kept in no file")
    return kind
