"""msgspec's descriptions of struct types, made before a process has threads."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


def describe_structs() -> None:
    """Make the description of every struct type that is imported; call it before the first thread starts.

    msgspec 0.22 makes it when a type is first decoded, and shares it before it is complete: a second thread that
    decodes the same type in this moment ends the process with a segmentation fault.
    """
    for kind in dict.fromkeys(_subclasses(msgspec.Struct)):
        msgspec.json.Decoder(kind)


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
