"""Fields of a JSON object that a file's author may have got wrong, each fault named with its path."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from control.errors import ModelFilesError, UnsupportedArchitecture

REMEDY = "Use the unquantized checkpoint, or one in another format."
LARGEST = 2**24
"""No size of a group or block is above it."""


class Fields:
    """The object at `path` of config.json. A field that is null is one that is missing."""

    def __init__(self, given: object, path: str) -> None:
        """Raises ModelFilesError if `given` is no object."""
        if not isinstance(given, dict):
            raise ModelFilesError(f"config.json: {path} must be an object, not {_shown(given)}.")
        self._given, self.path = cast(dict[str, Any], given), path

    def has(self, name: str) -> bool:
        return self._given.get(name) is not None

    def value(self, name: str) -> Any:
        return self._given.get(name)

    def text(self, name: str, default: str) -> str:
        given = self._given.get(name)
        if given is not None and not isinstance(given, str):
            raise self._wrong(name, "a text")
        return given or default

    def one_of(self, name: str, allowed: tuple[object, ...], why: str = "") -> Any:
        """The field's value; UnsupportedArchitecture if it is none of `allowed`, compared with its type."""
        given = self._given.get(name)
        if not any(given is one or (type(given) is type(one) and given == one) for one in allowed):
            served = ", ".join(_shown(one) for one in allowed if one is not None) or "nothing"
            raise UnsupportedArchitecture(
                f"config.json has {self.path}.{name} = {_shown(given)}, which is not supported (served: {served}). "
                f"{f'{why}. ' if why else ''}{REMEDY}"
            )
        return given

    def empty(self, name: str) -> None:
        """Raises UnsupportedArchitecture for anything but null, {} and []."""
        if self._given.get(name):
            raise UnsupportedArchitecture(
                f"config.json has {self.path}.{name} = {_shown(self._given[name])}, which is not supported. {REMEDY}"
            )

    def sizes(self, name: str, count: int) -> Any:
        """A tuple of `count` positive whole numbers."""
        given = self._given.get(name)
        if not isinstance(given, list) or len(given) != count or not all(_size(one) for one in given):
            raise self._wrong(name, f"{count} positive whole numbers")
        return tuple(given)

    def group(self, name: str) -> int:
        """The inputs that share a scale: a multiple of 8, or -1 for all inputs."""
        given: Any = self._given.get(name)
        if type(given) is int and (given == -1 or (0 < given <= LARGEST and given % 8 == 0)):
            return given
        raise self._wrong(name, "a positive multiple of 8, or -1")

    def object(self, name: str) -> Fields:
        return Fields(self._given.get(name), f"{self.path}.{name}")

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of the object `name`, at least one."""
        given = self._given.get(name)
        if not isinstance(given, dict) or not given:
            raise self._wrong(name, "an object with at least one group")
        for key, one in given.items():
            yield Fields(one, f"{self.path}.{name}.{key}")

    def _wrong(self, name: str, needed: str) -> ModelFilesError:
        return ModelFilesError(
            f"config.json has {self.path}.{name} = {_shown(self._given.get(name))}; needed is {needed}."
        )


def _size(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 < given <= LARGEST


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."
