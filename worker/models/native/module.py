"""The parts of a model whose forward is C++: plain objects, whose numbers a loader fills and a plan reads; and
the error of a model that has others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class NotNative(Exception):
    """A model that is left to torch; the message says why."""


def require(condition: bool, otherwise: str) -> None:
    """Raise NotNative with the reason `otherwise` unless `condition`."""
    if not condition:
        raise NotNative(otherwise)


@dataclass(frozen=True)
class Unfilled:
    """The place of a tensor that is not read yet."""

    shape: tuple[int, ...]


Numbers = NDArray[Any] | Unfilled


def address_of(numbers: Any) -> int | None:
    """Of the first of an array's numbers, for C++; None for no array."""
    return None if numbers is None else numbers.ctypes.data


class Module:
    """Its attributes are its parts, lists of parts, its numbers, and plain values."""

    def parts(self) -> Iterator[tuple[str, Module]]:
        """The parts of this one with their names; those of a list have numbers."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                several: list[Any] = value
                yield from (
                    (f"{name}.{index}", module) for index, module in enumerate(several) if isinstance(module, Module)
                )

    def modules(self, path: str = "") -> Iterator[tuple[str, Module]]:
        """This one and all below, with their dotted names; a part of two owners comes twice."""
        yield path, self
        for name, part in self.parts():
            yield from part.modules(f"{path}.{name}" if path else name)

    def numbers(self) -> Iterator[tuple[str, Numbers]]:
        """This one's own numbers by name."""
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray | Unfilled):
                yield name, value

    def at(self, path: str) -> Any:
        """The part, or the numbers, with a dotted name. Raises AttributeError or IndexError."""
        part: Any = self
        for name in path.split(".") if path else ():
            part = part[int(name)] if isinstance(part, list) else getattr(part, name)
        return part

    def replace(self, path: str, part: Module) -> None:
        """Put `part` where the one with the dotted name `path` is."""
        owner, _, name = path.rpartition(".")
        setattr(self.at(owner), name, part)

    @property
    def bytes(self) -> int:
        """Of all numbers; those that two parts share count once."""
        arrays = {id(numbers): numbers for _, part in self.modules() for numbers in part.own_numbers()}
        return sum(array.nbytes for array in arrays.values())

    def own_numbers(self) -> Iterator[Any]:
        """The objects with `nbytes` that `bytes` counts for this module."""
        yield from (numbers for _, numbers in self.numbers() if not isinstance(numbers, Unfilled))
