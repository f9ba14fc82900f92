"""Checks of single fields of a config.json."""

from __future__ import annotations

from typing import Any, TypeGuard

from control.errors import ModelFilesError

LARGEST = 2**31 - 1
"""No size that a model has is above it, and no product of two of them overflows."""
LARGEST_SIZE = 2**20
"""Of a part of a recurrent layer."""


def is_whole(value: Any, least: int = 1, most: int = LARGEST) -> TypeGuard[int]:
    """True for a whole number within the bounds, both included."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong(name: str, value: object, needed: str) -> ModelFilesError:
    """The error for a field `name` with a value other than `needed`."""
    return ModelFilesError(f"config.json has {name} = {str(value)[:60]}; {needed} is needed.")


def size(config: dict[str, Any], name: str, default: int, least: int = 1) -> int:
    """The size `name`, or `default` where there is none. Raises ModelFilesError."""
    value = config.get(name)
    value = default if value is None else value
    if not is_whole(value, most=LARGEST_SIZE):
        raise wrong(name, value, f"a whole number from 1 to {LARGEST_SIZE}")
    if value < least:
        raise wrong(name, value, f"at least {least}")
    return value


def switch(config: dict[str, Any], name: str, default: bool) -> bool:
    """The switch `name`, or `default` where there is none. Raises ModelFilesError."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value
