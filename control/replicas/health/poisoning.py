"""Poison: the mark of an epoch whose device or collective state can't be trusted; the first to notice sets it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from control.constants import POISONS_LENGTH
from control.keys import ModelKeys, ReplicaKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run
from control.redis.streams import Entry


@dataclass(frozen=True, slots=True)
class Poison:
    """The reason for which `epoch` must be left; `rank` caused or noticed it, and is -1 where no rank did."""

    epoch: int
    rank: int
    kind: str
    message: str


def poison(model: str, replica: str, epoch: int, rank: int, kind: str, message: str) -> Call[bool]:
    """True if this poison was stored; False if the epoch was poisoned before, or is over."""
    keys = ReplicaKeys(model, replica)
    args = (epoch, rank, kind, message, ModelKeys(model).base)
    return Call("poison", (keys.poison, keys.poisons, keys.epoch), args, bool)


def write_poison(client: SyncRedis, model: str, replica: str, epoch: int, rank: int, kind: str, message: str) -> bool:
    """As `poison`, run."""
    return run(client, poison(model, replica, epoch, rank, kind, message))


def poison_of(model: str, replica: str) -> Call[Poison | None]:
    """The newest epoch's poison; acquiring the next epoch clears it."""

    def parse(reply: dict[str, str]) -> Poison | None:
        if not reply:
            return None
        return Poison(int(reply["epoch"]), int(reply["rank"]), reply["kind"], reply["message"])

    return read("HGETALL", ReplicaKeys(model, replica).poison, parse=parse)


def read_poison(client: SyncRedis, model: str, replica: str) -> Poison | None:
    """As `poison_of`, run."""
    return run(client, poison_of(model, replica))


def poison_history(model: str, replica: str) -> Call[list[Poison]]:
    """How the replica's epochs ended that were poisoned, newest first; one entry per epoch."""

    def parse(reply: list[Entry]) -> list[Poison]:
        return [Poison(int(one["epoch"]), int(one["rank"]), one["kind"], one["message"]) for _, one in reply]

    stream = ReplicaKeys(model, replica).poisons
    return read("XREVRANGE", stream, "+", "-", "COUNT", POISONS_LENGTH, parse=parse)


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A poison with the time of the server at which it was set."""

    at_ms: int
    epoch: int
    rank: int
    """The rank that caused or noticed it; -1 where no rank did."""
    kind: str
    message: str


def faults(model: str, replica: str, since_ms: int = 0, until_ms: int | None = None) -> Call[list[Fault]]:
    """The poisons of a replica in a time, oldest first."""

    def parse(reply: list[Entry]) -> list[Fault]:
        return [
            Fault(
                at_ms=int(entry.partition("-")[0]),
                epoch=int(one["epoch"]),
                rank=int(one["rank"]),
                kind=one["kind"],
                message=one["message"],
            )
            for entry, one in reply
        ]

    until = "+" if until_ms is None else until_ms
    return read(
        "XRANGE", ReplicaKeys(model, replica).poisons, since_ms, until, "COUNT", 2 * POISONS_LENGTH, parse=parse
    )
