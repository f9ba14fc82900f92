"""The error of a model that C++ does not run."""

from __future__ import annotations


class NotNative(Exception):
    """A model that is left to torch; the message says why."""


def require(held: bool, otherwise: str) -> None:
    """Raise NotNative with the reason `otherwise` unless `held`."""
    if not held:
        raise NotNative(otherwise)
