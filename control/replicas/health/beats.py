"""Heartbeats that carry progress: the last completed step and the age of the oldest one that waits."""

from __future__ import annotations

from typing import Any

import msgspec

from control.constants import RANK_BEAT_MS
from control.keys import ReplicaKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every
from control.replicas.lease import granted

BEAT_LIFE_S = RANK_BEAT_MS / 1000


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's word. `seq` is its last completed command, `oldest_pending_ms` how long the current one takes."""

    epoch: int
    seq: int
    oldest_pending_ms: int
    device: str
    memory_bytes: int
    phase: str
    """starting, forming, loading or ready."""
    pid: int
    host: str
    kv_used: int = 0
    """Tokens of KV memory that running sequences hold; told by the leader, as is the next."""
    kv_kept: int = 0
    """Those that ended sequences hold until somebody needs the room."""
    kv_limit: int = 0
    """The most that all sequences may hold together, which the ranks have kept to since; 0 until it is known."""
    running: int = 0
    """Requests that the leader runs."""
    tokens: int = 0
    """Tokens that the replica's leaders on this host have brought, as the next two since its counters began."""
    first_tokens: int = 0
    """Requests that got their first token."""
    first_tokens_ms: int = 0
    """The sum of their times from the queue to the first token."""
    read_bytes: int = 0
    """Of the checkpoint's `weight_bytes`, in the phase loading; 0 of 0 before it."""
    weight_bytes: int = 0
    progress: int = 0
    """Changes as the rank gets on inside its current command."""
    stalled_ms: int = 0
    """How long the current command has not got on, on any rank as far as this one knows; 0 where none is under way."""
    forward_ms: int = 0
    """Of the last five seconds those in forwards, each from its first exchange between ranks on."""
    waited_ms: int = 0
    """Of these, those in which the rank waited for other ranks."""


def beat(model: str, replica: str, rank: int, word: Beat) -> Call[None]:
    """Say it; heard for BEAT_LIFE_S. Raises Fenced when the epoch has moved on."""
    keys = ReplicaKeys(model, replica)
    fields: dict[str, Any] = msgspec.to_builtins(word)

    def parse(reply: list[Any]) -> None:
        granted(reply)

    args = (word.epoch, *(part for pair in fields.items() for part in pair))
    return Call("beat", (keys.heartbeat(rank), keys.epoch), args, parse)


def read_beat(model: str, replica: str, rank: int) -> Call[Beat | None]:
    """The rank's last word, None when it is silent."""

    def parse(reply: dict[str, str]) -> Beat | None:
        return msgspec.convert(reply, Beat, strict=False) if reply else None

    return read("HGETALL", ReplicaKeys(model, replica).heartbeat(rank), parse=parse)


def heartbeats(client: SyncRedis, model: str, replica: str, world_size: int) -> list[Beat | None]:
    """Every rank's last word, by rank; None for a silent one."""
    return run_every(client, [read_beat(model, replica, rank) for rank in range(world_size)])


def epoch_of(model: str, replica: str) -> Call[int]:
    """The replica's newest epoch, 0 before the first."""

    def parse(reply: str | None) -> int:
        return int(reply or 0)

    return read("GET", ReplicaKeys(model, replica).epoch, parse=parse)


def read_led_epoch(client: SyncRedis, model: str, replica: str) -> int:
    """The epoch whose leader holds the lock now, 0 while nobody does."""

    def parse(reply: str | None) -> int:
        return int(reply.rpartition(":")[2]) if reply else 0

    return run(client, read("GET", ReplicaKeys(model, replica).lock, parse=parse))


def read_epoch(client: SyncRedis, model: str, replica: str) -> int:
    """As `epoch_of`, run."""
    return run(client, epoch_of(model, replica))
