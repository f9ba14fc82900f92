"""Prompts of a given length, each different from its first word on, so that no cache answers for the engine."""

from __future__ import annotations

_TEXT = (
    "count from one to nine and tell me what a leader does when a rank of its group has died while the farm "
    "was busy with the requests of many users who all wait for their tokens"
)
_WORDS = _TEXT.split()


def prompt(index: int, length: int) -> str:
    """A text of exactly `length` ASCII characters (at least the number's), the same for the same `index`."""
    text = f"{index}:"
    step = index % 7 + 1
    at = index
    while len(text) < length:
        text += " " + _WORDS[at % len(_WORDS)]
        at += step
    return text[: max(length, len(f"{index}:"))]
