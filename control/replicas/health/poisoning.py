"""Poison: the mark of an epoch whose device or collective state can't be trusted; the first to notice sets it."""

from __future__ import annotations

from dataclasses import dataclass

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
