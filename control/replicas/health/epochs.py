"""How each epoch came to be: the moments of its formation, for whoever asks where the time of a recovery went."""

from __future__ import annotations

from typing import Any

import msgspec

from control.constants import EPOCHS_LENGTH
from control.keys import ReplicaKeys
from control.redis.connection import Call, read, write
from control.redis.streams import Entry


class Formation(msgspec.Struct, frozen=True):
    """When an epoch's group reached each stage, in ms since 1970 on its leader's clock."""

    epoch: int
    led: int
    """The leader took the lock."""
    gathered: int
    """Every rank answered: processes that had to be started are there."""
    joined: int
    """The rendezvous is over and a sum over all ranks has proved it."""
    loaded: int
    """Every rank has its shard; most kept it from the epoch before."""


def note_formation(model: str, replica: str, formation: Formation) -> Call[None]:
    """Write it down; twice does no harm."""
    fields: list[Any] = []
    for name, value in msgspec.structs.asdict(formation).items():
        fields += (name, value)
    stream = ReplicaKeys(model, replica).epochs
    return write("XADD", stream, "MAXLEN", "~", EPOCHS_LENGTH, "*", *fields, parse=lambda _: None)


def formations(model: str, replica: str) -> Call[list[Formation]]:
    """The replica's latest epochs that were formed, newest first."""

    def parse(reply: list[Entry]) -> list[Formation]:
        by_epoch = {int(fields["epoch"]): fields for _, fields in reply}
        return [msgspec.convert(fields, Formation, strict=False) for fields in by_epoch.values()]

    return read("XREVRANGE", ReplicaKeys(model, replica).epochs, "+", "-", "COUNT", EPOCHS_LENGTH, parse=parse)
