"""The health of one replica, as its ranks, leaders and agents report it: heartbeats, epochs, poison, the reasons with
which rank processes ended, and the status that its agent gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from control.constants import END_REASON_MS, EPOCHS_LENGTH, POISONS_LENGTH, RANK_BEAT_MS
from control.keys import ModelKeys, ReplicaKeys
from control.placement.give_back import AssignmentsByHost, KvUse, Uses, lenders
from control.placement.placement import Needs
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Entry, read, run, run_every, write
from control.replicas.lease import granted

BEAT_LIFE_S = RANK_BEAT_MS / 1000


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's heartbeat. `seq` is its last completed command, `oldest_pending_ms` the age of the current one."""

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
    """Tokens of KV memory that running sequences hold. Only the leader sets this field and the next."""
    kv_kept: int = 0
    """Tokens that ended sequences hold until the room is needed."""
    kv_limit: int = 0
    """The most tokens that all sequences may hold together; the ranks keep to it. 0 until it is known."""
    running: int = 0
    """Requests that the leader runs."""
    tokens: int = 0
    """Tokens that the replica's leaders on this host have emitted since its counters began, as the next two fields."""
    first_tokens: int = 0
    """Requests that got their first token."""
    first_tokens_ms: int = 0
    """The sum of their times from the queue to the first token."""
    read_bytes: int = 0
    """Of the checkpoint's `weight_bytes`, in the phase loading; 0 of 0 before it."""
    weight_bytes: int = 0
    progress: int = 0
    """A number that changes while the rank makes progress inside its current command."""
    stalled_ms: int = 0
    """Milliseconds for which the current command has made no progress on any rank, as far as this one knows; 0 without
    a command."""
    forward_ms: int = 0
    """Milliseconds of the last five seconds in forwards, each counted from its first exchange between ranks."""
    waited_ms: int = 0
    """Milliseconds of `forward_ms` in which the rank waited for other ranks."""


def beat(model: str, replica: str, rank: int, report: Beat) -> Call[None]:
    """Write the heartbeat, which lives for BEAT_LIFE_S. Raises Fenced when the epoch has moved on."""
    keys = ReplicaKeys(model, replica)
    fields: dict[str, Any] = msgspec.to_builtins(report)

    def parse(reply: list[Any]) -> None:
        granted(reply)

    args = (report.epoch, *(part for pair in fields.items() for part in pair))
    return Call("beat", (keys.heartbeat(rank), keys.epoch), args, parse)


def read_beat(model: str, replica: str, rank: int) -> Call[Beat | None]:
    """The rank's heartbeat; None where it has lapsed."""

    def parse(reply: dict[str, str]) -> Beat | None:
        return msgspec.convert(reply, Beat, strict=False) if reply else None

    return read("HGETALL", ReplicaKeys(model, replica).heartbeat(rank), parse=parse)


def heartbeats(client: SyncRedis, model: str, replica: str, world_size: int) -> list[Beat | None]:
    """Every rank's heartbeat, by rank; None where it has lapsed."""
    return run_every(client, [read_beat(model, replica, rank) for rank in range(world_size)])


LEAST_MS = 500
"""Forwards of the last five seconds, below which too little was seen."""

WAITS = 0.5
"""Share of a rank's forwards from which on it waits for others."""

NEVER_WAITS = 0.1
"""Share below which others wait for it."""


def slow_ranks(beats: Sequence[Beat | None]) -> list[int]:
    """The ranks for which all others of their group wait: those spend more than half of their forwards so, these less
    than a tenth. Empty while a rank is silent, or the group has hardly computed."""
    reported = [beat for beat in beats if beat is not None]
    if len(beats) < 2 or len(reported) < len(beats) or len({beat.epoch for beat in reported}) > 1:
        return []
    if any(beat.forward_ms < LEAST_MS for beat in reported):
        return []
    shares = [beat.waited_ms / beat.forward_ms for beat in reported]
    slow = [rank for rank, share in enumerate(shares) if share < NEVER_WAITS]
    waiting = [rank for rank, share in enumerate(shares) if share > WAITS]
    return slow if waiting and len(slow) + len(waiting) == len(shares) else []


def kv_uses(client: SyncRedis, by_host: AssignmentsByHost, needs: Needs) -> Uses:
    """Of the replicas that may be asked to give KV memory back, as far as they serve. Raises RedisUnavailable."""
    places = list(lenders(by_host, needs))
    beats = run_every(client, [read_beat(model, replica, 0) for model, replica in places])
    return {
        place: KvUse(used=beat.kv_used, limit=beat.kv_limit)
        for place, beat in zip(places, beats, strict=True)
        if beat is not None and beat.kv_limit > 0
    }


def epoch_of(model: str, replica: str) -> Call[int]:
    """The replica's newest epoch, 0 before the first."""

    def parse(reply: str | None) -> int:
        return int(reply or 0)

    return read("GET", ReplicaKeys(model, replica).epoch, parse=parse)


def read_epoch(client: SyncRedis, model: str, replica: str) -> int:
    """As `epoch_of`, run."""
    return run(client, epoch_of(model, replica))


def read_led_epoch(client: SyncRedis, model: str, replica: str) -> int:
    """The epoch whose leader holds the lock now, 0 while nobody does."""

    def parse(reply: str | None) -> int:
        return int(reply.rpartition(":")[2]) if reply else 0

    return run(client, read("GET", ReplicaKeys(model, replica).lock, parse=parse))


class Formation(msgspec.Struct, frozen=True):
    """The times at which an epoch's group reached each stage, in ms since 1970 on its leader's clock."""

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
    """Add it to the replica's stream of epochs; a repeat does no harm."""
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


@dataclass(frozen=True, slots=True)
class Poison:
    """The reason for which `epoch` must be left: the state of a device or of the collectives can't be trusted.

    The first process to notice it sets it. `rank` caused or noticed it, and is -1 where no rank did.
    """

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
    """The ends of the replica's poisoned epochs, newest first; one entry per epoch."""

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


class EndReason(msgspec.Struct, frozen=True):
    """The reason for which a process ended; the agent sees no more than an exit status. `host` and `pid` name the
    process, because a later one may have the same rank."""

    host: str
    pid: int
    message: str


def note_end(model: str, replica: str, rank: int, reason: EndReason) -> list[Call[int]]:
    """Store the reason before the process exits; the calls may be repeated."""
    key = ReplicaKeys(model, replica).ends
    text = msgspec.json.encode(reason).decode()
    return [read("HSET", key, str(rank), text, parse=int), read("PEXPIRE", key, END_REASON_MS, parse=int)]


def end_reason(model: str, replica: str, rank: int, host: str, pid: int) -> Call[str | None]:
    """The message that the process stored, or None."""

    def parse(reply: str | None) -> str | None:
        reason = msgspec.json.decode(reply, type=EndReason) if reply else None
        return reason.message if reason is not None and (reason.host, reason.pid) == (host, pid) else None

    return read("HGET", ReplicaKeys(model, replica).ends, str(rank), parse=parse)


AgentState = Literal["starting", "running", "backoff", "draining", "failed", "unplaceable", "stopped"]
"""`failed`: its agent gave it up, and tries again only a new revision. `unplaceable`: no host has room for it now."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What heartbeats can't tell, because no rank may be there. `detail` is for the operator: what is going on, or why
    it is not."""

    state: AgentState = "starting"
    detail: str = ""
    host: str = ""
    attempts: int = 0
    tp: int = 0
    downloaded_bytes: int = 0
    """Of the file that is being downloaded; `download_bytes` are all of it, 0 where there is no download."""
    download_bytes: int = 0


def write_status(
    client: SyncRedis, model: str, replica: str, state: AgentState, detail: str, **fields: str | int
) -> None:
    """Set state and detail, and the other fields that are given."""
    words = ["state", state, "detail", detail, *(word for pair in fields.items() for word in pair)]
    run(client, write("HSET", ReplicaKeys(model, replica).status, *words, parse=int))


def clear_status(client: SyncRedis, model: str, replica: str) -> None:
    """The replica does not run on any host any more."""
    run(client, read("DEL", ReplicaKeys(model, replica).status, parse=int))


def status_of(model: str, replica: str) -> Call[Status | None]:
    """None while no agent has the replica."""

    def parse(reply: dict[str, str]) -> Status | None:
        return msgspec.convert(reply, Status, strict=False) if reply else None

    return read("HGETALL", ReplicaKeys(model, replica).status, parse=parse)


@dataclass(frozen=True, slots=True)
class Look:
    """The newest epoch, its poison, the agents' status, and the last heartbeat of each rank."""

    epoch: int
    poison: Poison | None
    status: Status | None
    beats: list[Beat | None]

    @classmethod
    def of(cls, replies: Sequence[Any]) -> Look:
        """From the replies to the calls of `look_at`."""
        epoch, poison, status, *beats = replies
        return cls(epoch, poison, status, beats)


def look_at(model: str, replica: str, tp: int) -> list[Call[Any]]:
    """The calls whose replies make a Look at a replica of `tp` ranks."""
    beats = (read_beat(model, replica, rank) for rank in range(tp))
    return [epoch_of(model, replica), poison_of(model, replica), status_of(model, replica), *beats]
