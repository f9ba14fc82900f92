"""The load of a model: its queue, and counts since the model was first loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from control.keys import CLASSES, ModelKeys
from control.redis.connection import Call, read

_ENOUGH_ENDS = 4
"""Fewer ends say nothing about the time that an end takes; as in `_drain.lua`."""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Of the requests that wait: their number, also by class, and their prompt tokens. Counts: requests that came and
    that ended, epochs, and poisons by kind."""

    queued: int = 0
    queued_tokens: int = 0
    by_class: dict[str, int] = field(default_factory=dict[str, int])
    expected_wait_ms: int | None = None
    """Time until a new request of the lowest class is claimed; None where too little was seen to tell."""
    enqueued: int = 0
    ended: int = 0
    epochs: int = 0
    poisons: dict[str, int] = field(default_factory=dict[str, int])


def load_of(model: str) -> Call[ModelLoad]:
    """The call that reads it."""
    return read("HGETALL", ModelKeys(model).load, parse=_load)


def queued_of(model: str) -> Call[int]:
    """The number of requests that wait."""
    return read("HGET", ModelKeys(model).load, "queued", parse=lambda reply: max(0, int(reply or 0)))


def _load(fields: dict[str, str]) -> ModelLoad:
    def count(name: str) -> int:
        return max(0, int(fields.get(name) or 0))

    return ModelLoad(
        queued=count("queued"),
        queued_tokens=count("queued_tokens"),
        by_class={name: count(f"queued:{name}") for name in CLASSES},
        expected_wait_ms=_expected_wait_ms(fields, sum(count(f"sequences:{name}") for name in CLASSES)),
        enqueued=count("enqueued"),
        ended=count("ended"),
        epochs=count("epochs"),
        poisons={name.partition(":")[2]: count(name) for name in sorted(fields) if name.startswith("poisons:")},
    )


def _expected_wait_ms(fields: dict[str, str], ahead: int) -> int | None:
    """As `enqueue` computes it, with every waiting sequence ahead."""
    if not ahead:
        return 0
    busy_ms = float(fields.get("busy_ms") or 0)
    ends = float(fields.get("busy_ends") or 0)
    if not fields.get("busy_since") or not busy_ms or ends < _ENOUGH_ENDS:
        return None
    return max(0, round(ahead * busy_ms / (ends + 1) + float(fields.get("slip") or 0)))
