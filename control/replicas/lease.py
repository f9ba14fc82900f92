"""The lock of a replica and its fencing epoch: one leader at a time, and a paused one can do no harm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from control.errors import Fenced, Lost, Poisoned
from control.keys import ModelKeys, ReplicaKeys
from control.redis.connection import Call, read


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to lead `replica` of `model` in `epoch`; `owner` is unique to the process.

    `weights` is the fingerprint of those that the replica's tokens come from; without one it continues any request.
    """

    model: str
    replica: str
    owner: str
    epoch: int
    weights: str = ""

    @property
    def token(self) -> str:
        """The lock's value; every script of the leader compares it."""
        return f"{self.owner}:{self.epoch}"

    @property
    def keys(self) -> ReplicaKeys:
        return ReplicaKeys(self.model, self.replica)

    @property
    def model_keys(self) -> ModelKeys:
        return ModelKeys(self.model)


def granted(reply: list[Any]) -> list[Any]:
    """The reply of a fenced script without its status.

    Raises Lost, Fenced or Poisoned as the script found.
    """
    status = reply[0]
    if status == "LOST":
        raise Lost(reply[1])
    if status == "FENCED":
        raise Fenced(reply[1])
    if status == "POISONED":
        raise Poisoned(reply[1], reply[2], int(reply[3]))
    return reply[1:]


def acquire(
    model: str, replica: str, owner: str, world_size: int, floor: int = 0, weights: str = ""
) -> Call[Lease | None]:
    """Take the lock if it is free and begin a new epoch, greater than any before and than `floor`.

    None while another holds it. Deletes the command and reply streams of older epochs and their poison.
    """
    keys = ReplicaKeys(model, replica)

    def parse(reply: int | None) -> Lease | None:
        return Lease(model, replica, owner, int(reply), weights) if reply else None

    return Call(
        "acquire",
        (keys.lock, keys.epoch, keys.poison),
        (owner, keys.base, world_size, floor, ModelKeys(model).base),
        parse,
    )


def renew(lease: Lease, world_size: int) -> Call[bool]:
    """Keep the lock and the epoch's streams alive. A lock that ran out is taken again if nobody moved the epoch on and
    the server has run without a break: True then. Raises Lost or Fenced."""

    def parse(reply: list[Any]) -> bool:
        return bool(granted(reply)[0])

    keys = lease.keys
    return Call("renew", (keys.lock, keys.epoch), (lease.token, keys.base, world_size), parse)


def close_epoch(lease: Lease) -> Call[bool]:
    """End the epoch of a lease that was lost, for its other ranks too; False if somebody holds the lock (again)."""
    keys = lease.keys
    return Call("close_epoch", (keys.lock, keys.epoch), (lease.token,), bool)


def release(lease: Lease) -> Call[bool]:
    """Give the lock back; False if it was not held any more."""
    return release_token(lease.model, lease.replica, lease.token)


def release_token(model: str, replica: str, token: str) -> Call[bool]:
    """Release exactly `token`: what an agent does for a leader that it has reaped."""
    keys = ReplicaKeys(model, replica)
    return Call("release", (keys.lock, keys.server), (token,), bool)


def holder(model: str, replica: str) -> Call[str | None]:
    """The token that holds the lock, or None."""

    def parse(reply: str | None) -> str | None:
        return reply

    return read("GET", ReplicaKeys(model, replica).lock, parse=parse)
