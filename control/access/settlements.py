"""Settlements: what requests of limited API keys took, from the model's slot to the key's.

A model and a key are in different slots of a Cluster, so no script ends a request and changes its key's bucket. The
script that ends it, and emit now and then while it runs, add a settlement to the model's stream. Any process reads it,
applies it and deletes it. Applying one twice changes nothing, so no process has to own it, and each may die meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from control import keys
from control.access.limits import settle
from control.keys import ModelKeys
from control.redis.connection import Call, read

MOST_READ = 128
"""Settlements read in one call."""


@dataclass(frozen=True, slots=True)
class Settlement:
    """`tokens` are all that request `rid` took, or so far if it has not ended; `id` is its place in the stream."""

    id: str
    key_id: str
    hold: str
    rid: str
    tokens: int
    ended: bool

    def apply(self) -> Call[bool]:
        """Put the truth in the estimate's place; False where that was done before."""
        return settle(self.key_id, self.hold, self.rid, self.tokens, ended=self.ended)


def pending(model: str) -> Call[list[Settlement]]:
    """The oldest MOST_READ settlements of a model that nobody has deleted."""

    def parse(reply: list[tuple[str, dict[str, str]]] | None) -> list[Settlement]:
        return [
            Settlement(
                entry, fields["key"], fields["hold"], fields["rid"], int(fields["tokens"]), fields["ended"] == "1"
            )
            for entry, fields in reply or []
        ]

    return read("XRANGE", ModelKeys(model).settlements, "-", "+", "COUNT", MOST_READ, parse=parse)


def forget(model: str, settlements: Sequence[Settlement]) -> Call[int]:
    """Delete settlements that were applied."""
    return read("XDEL", ModelKeys(model).settlements, *(one.id for one in settlements), parse=int)


def metered_models() -> Call[set[str]]:
    """Every model that may have settlements, the unloaded ones included."""

    def parse(reply: Any) -> set[str]:
        return set(reply)

    return read("SMEMBERS", keys.METERED, parse=parse)
