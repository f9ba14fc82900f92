"""The health of replicas: what ranks, leaders and agents report of them (heartbeats, ends, epochs, poison, status), and
the state of every model and replica that follows from it, read in a few round trips: for the operator, for /ready, for
refusals, and for the rollout of a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal

import msgspec

from control import constants, keys
from control.constants import END_REASON_MS, EPOCHS_LENGTH, POISONS_LENGTH, RANK_BEAT_MS
from control.engines import OWN
from control.keys import CLASSES, ModelKeys, ReplicaKeys
from control.messages import ModelKind, ModelSpec, PoolingAssets
from control.placement import farm
from control.placement.demand import Demand
from control.placement.give_back import Held, KvUse, Uses, lenders
from control.placement.placement import Needs, replica_count
from control.placement.rollout import free_names, in_order
from control.records import catalog
from control.records.backend import Backend, backends
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Entry, Steps, optional_text, read, run, run_every, run_steps, write
from control.replicas.lease import granted, holder

# --- Heartbeats ------------------------------------------------------------------------------------------------------

# Heartbeats that carry progress: the last completed step and the age of the oldest one that waits.


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
    """Milliseconds for which the current command has made no progress on any rank, as far as this one knows; 0 without
    a command."""
    forward_ms: int = 0
    """Of the last five seconds those in forwards, each from its first exchange between ranks on."""
    waited_ms: int = 0
    """Of these, those in which the rank waited for other ranks."""


def beat(model: str, replica: str, rank: int, word: Beat) -> Call[None]:
    """Write the heartbeat, which lives for BEAT_LIFE_S. Raises Fenced when the epoch has moved on."""
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


# --- Ends of ranks ---------------------------------------------------------------------------------------------------

# The error message with which a rank process ended; its agent sees no more than an exit status.


class EndReason(msgspec.Struct, frozen=True):
    """`host` and `pid` name the process, because a later one may have the same rank."""

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


# --- Epochs ----------------------------------------------------------------------------------------------------------

# The moments of each epoch's formation show which stage of a recovery took the time.


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


# --- Poison ----------------------------------------------------------------------------------------------------------

# Poison: the mark of an epoch whose device or collective state can't be trusted; the first to notice sets it.


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


# --- Status ----------------------------------------------------------------------------------------------------------

# An agent's word on a replica that it runs: what heartbeats can't tell, because nobody is there to beat.


AgentState = Literal["starting", "running", "backoff", "draining", "failed", "unplaceable", "stopped"]
"""`failed`: its agent gave it up, and tries again only a new revision. `unplaceable`: no host has room for it now."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`detail` is for the operator: what is going on, or why it is not."""

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


# --- A look at all ---------------------------------------------------------------------------------------------------

# One look at a replica: for the agents of its hosts, and for the overview of its model.


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


# --- KV memory -------------------------------------------------------------------------------------------------------

# The KV memory that replicas use, as their leaders tell it.


def kv_uses(client: SyncRedis, held: Held, needs: Needs) -> Uses:
    """Of the replicas that may be asked to give KV memory back, as far as they serve. Raises RedisUnavailable."""
    places = list(lenders(held, needs))
    beats = run_every(client, [read_beat(model, replica, 0) for model, replica in places])
    return {
        place: KvUse(used=beat.kv_used, limit=beat.kv_limit)
        for place, beat in zip(places, beats, strict=True)
        if beat is not None and beat.kv_limit > 0
    }


# --- Slow ranks ------------------------------------------------------------------------------------------------------

# The slow ranks of a group, from the heartbeats of one moment.


LEAST_MS = 500
"""Forwards of the last five seconds, below which too little was seen."""
WAITS = 0.5
"""Share of a rank's forwards from which on it waits for others."""
NEVER_WAITS = 0.1
"""Share below which others wait for it."""


def slow_ranks(beats: Sequence[Beat | None]) -> list[int]:
    """The ranks for which all others of their group wait: those spend more than half of their forwards so, these less
    than a tenth. Empty while a rank is silent, or the group has hardly computed."""
    heard = [beat for beat in beats if beat is not None]
    if len(beats) < 2 or len(heard) < len(beats) or len({beat.epoch for beat in heard}) > 1:
        return []
    if any(beat.forward_ms < LEAST_MS for beat in heard):
        return []
    shares = [beat.waited_ms / beat.forward_ms for beat in heard]
    slow = [rank for rank, share in enumerate(shares) if share < NEVER_WAITS]
    waiting = [rank for rank, share in enumerate(shares) if share > WAITS]
    return slow if waiting and len(slow) + len(waiting) == len(shares) else []


# --- State -----------------------------------------------------------------------------------------------------------

# The state of a replica and of a model, as a pure function of what Redis holds.


ReplicaState = Literal["loading", "loaded", "sleeping", "poisoned", "recovering", "failed", "draining", "unloading"]
"""A model on demand without a replica is `sleeping`; no replica is."""

ASLEEP = "its next request loads it"
"""The detail of a model that sleeps."""

NO_WORKER = "no worker has it yet"
NO_LEADER = "its leader is starting"
"""Details of a replica whose processes are not there yet."""

STUCK_MS = 30_000
"""Ranks of which none has got on in its command for this long are not healthy, however steadily they beat."""

_BEST_FIRST: tuple[ReplicaState, ...] = (
    "loaded",
    "recovering",
    "poisoned",
    "loading",
    "sleeping",
    "draining",
    "unloading",
    "failed",
)


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """Everything that a replica's state follows from. `beats` are by rank."""

    unload: bool
    """The model's specification is a tombstone."""
    published: bool
    """The model's assets are there, without which no API process serves it."""
    served_before: bool
    """The replica published what its answers depend on, which it does before it claims its first request."""
    status: Status | None
    epoch: int
    locked: bool
    poison: Poison | None
    beats: Sequence[Beat | None]


def replica_state(view: ReplicaView) -> tuple[ReplicaState, str]:
    """The state and, where it is not simply loaded, why.

    Loaded means progress, not pulse: every rank beats in the current epoch, is ready, and none is stuck. Until it has
    served for the first time a replica is loading, also where a process of it died meanwhile; later it is recovering.
    """
    status = view.status
    if view.unload:
        return ("draining", "") if view.locked else ("unloading", "")
    if status is not None and status.state in ("failed", "unplaceable"):
        return "failed", status.detail
    if status is not None and status.state == "draining":
        return "draining", status.detail
    if view.poison is not None and view.poison.epoch == view.epoch:
        return "poisoned", f"rank {view.poison.rank}: {view.poison.kind}: {view.poison.message}"
    obstacle = _obstacle(view)
    if obstacle is None:
        return "loaded", ""
    detail = status.detail if status is not None and status.detail else obstacle
    return ("recovering" if view.served_before else "loading"), detail


def _obstacle(view: ReplicaView) -> str | None:
    """The reason for which the replica is not loaded, or None."""
    if view.status is None and not view.locked:
        return NO_WORKER
    if not view.locked:
        return NO_LEADER
    for rank, beat in enumerate(view.beats):
        if beat is None or beat.epoch != view.epoch:
            return f"rank {rank} is not there yet"
        if beat.phase != "ready":
            share = int(100 * beat.read_bytes / max(1, beat.weight_bytes))
            much = f": {share} %" if beat.phase == "loading" and share else ""
            return f"rank {rank} is {beat.phase}{much}"
    if (stuck := _stuck(view.beats)) is not None:
        return stuck
    return None if view.published else "the model's assets are not published yet"


def _stuck(beats: Sequence[Beat | None]) -> str | None:
    """The rank whose command is the oldest, where no rank that has a command gets on with it. A rank that waits in a
    collective for a slower one stands still, and is not stuck."""
    busy = [
        (beat.oldest_pending_ms, beat.stalled_ms, rank)
        for rank, beat in enumerate(beats)
        if beat and beat.oldest_pending_ms
    ]
    if not busy or min(stalled for _, stalled, _ in busy) <= STUCK_MS:
        return None
    pending, stalled, rank = max(busy)
    return f"rank {rank} has been at one command for {pending / 1000:.0f} s, and got on last {stalled / 1000:.0f} s ago"


def model_state(
    replicas: Sequence[tuple[ReplicaState, str]], unload: bool = False, asleep: bool = False
) -> tuple[ReplicaState, str]:
    """A model is as well as its best replica; `failed` needs all of them to be. `asleep`: no replica is wanted now.

    While its last replica goes to make room for the next one, requests wait: only an unload takes a model away.
    """
    if not replicas or (asleep and not unload and all(state != "loaded" for state, _ in replicas)):
        return ("unloading", "") if unload else ("sleeping", ASLEEP)
    state, detail = min(replicas, key=lambda replica: _BEST_FIRST.index(replica[0]))
    if state == "draining" and not unload:
        return "recovering", "it is being replaced"
    return state, detail


def loading_bytes(state: ReplicaState, status: Status | None, beats: Sequence[Beat]) -> tuple[int, int]:
    """Bytes that are done and all of them: of a download, else of the weights that all ranks read; (0, 0) in other
    states. `beats` are those of the epoch."""
    if state not in ("loading", "recovering"):
        return 0, 0
    if status is not None and status.state == "starting" and status.download_bytes:
        return status.downloaded_bytes, status.download_bytes
    if not any(beat.phase == "loading" for beat in beats):
        return 0, 0
    return sum(beat.read_bytes for beat in beats), sum(beat.weight_bytes for beat in beats)


# --- Load ------------------------------------------------------------------------------------------------------------

# The load of a model: its queue, and counts since the model was first loaded.


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


# --- Overview --------------------------------------------------------------------------------------------------------


_TOGETHER = 64
"""Models that are read in the same round trips."""

AssetsMark = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class ReplicaOverview:
    """`seq` is the leader's last completed step; `devices` and `beats` are by rank, as far as they are heard; `host`
    names the hosts of those that are, comma between. The others wait for the ranks `slow`. `revision` is that of the
    specification which it runs, `backend` what its answers depend on, once it has loaded. `done_bytes` of
    `total_bytes` were downloaded of a file, or read of the weights; 0 of 0 while it does neither. It is not `placed`
    while no host has it, or has room for it."""

    replica: str
    revision: int
    state: ReplicaState
    detail: str
    host: str
    devices: list[str]
    epoch: int
    seq: int
    beats: list[Beat | None]
    backend: Backend | None = None
    done_bytes: int = 0
    total_bytes: int = 0
    placed: bool = True
    slow: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Overview:
    """`queued` requests wait for the model; leaders claim none while it is `paused`. `revision` is its specification's,
    `wanted` how many replicas are to run now, within its `scale` (`2`, or `0..4`), and `rolled_out` how many of this
    revision serve. `assets` changes with the assets of the model, and `kind` is what it gives; None while it was never
    loaded. `settings` changes with any field of its specification."""

    model: str
    state: ReplicaState
    detail: str
    queued: int
    revision: int
    wanted: int
    rolled_out: int
    assets: AssetsMark | None
    replicas: list[ReplicaOverview]
    paused: bool = False
    load: ModelLoad = field(default_factory=ModelLoad)
    kind: ModelKind | None = None
    settings: str = ""
    scale: str = ""
    engine: str = OWN

    @property
    def created(self) -> int:
        """The time at which its assets were published first, in seconds since 1970; 0 without."""
        return int(self.assets[0] or 0) if self.assets else 0

    @property
    def context_length(self) -> int | None:
        """The most tokens of a sequence; None without assets."""
        return int(self.assets[2]) if self.assets and self.assets[2] else None

    @property
    def is_rolled_out(self) -> bool:
        """True if the desired number of replicas serves the newest revision and no other replica is left."""
        return self.rolled_out == self.wanted == len(self.replicas)


def overviews(client: SyncRedis) -> list[Overview]:
    """Every model that the farm knows, in order of name. Raises RedisUnavailable."""
    return run_steps(client, reading_overviews())


def reading_overviews(names: Sequence[str] | None = None) -> Steps[list[Overview]]:
    """The round trips of `overviews`. `names`: those of all models, where they were read before."""
    every: Sequence[str] = (yield [catalog.names()])[0] if names is None else names
    models: list[Overview] = []
    for at in range(0, len(every), _TOGETHER):
        models += yield from _reading(every[at : at + _TOGETHER])
    return models


def overview(client: SyncRedis, model: str) -> Overview:
    """One model; an unknown one is loading, with the reason. Raises RedisUnavailable."""
    overviews_read = run_steps(client, _reading([model]))
    if not overviews_read:
        return Overview(model, "loading", "the farm does not know the model yet", 0, 0, 0, 0, None, [])
    return overviews_read[0]


def _reading(names: Sequence[str]) -> Steps[list[Overview]]:
    """Those of these few models that have a specification, in two round trips."""
    about = iter((yield [call for name in names for call in _about(name)]))
    rows = [(next(about), [*islice(about, 6)]) for _ in names]
    models = [_Model(spec, *fields) for spec, fields in rows if spec is not None]
    replies = iter((yield [call for model in models for call in _of_replicas(model)]))
    return [_overview(model, replies) for model in models]


@dataclass(frozen=True, slots=True)
class _Model:
    """The fields of a model that are read besides its replicas."""

    spec: ModelSpec
    load: ModelLoad
    assets: AssetsMark | None
    kind: ModelKind | None
    assigned: dict[str, catalog.Assigned]
    backends: dict[str, Backend]
    demand: Demand | None

    @property
    def wanted(self) -> int:
        """The replicas that are to run now."""
        return replica_count(self.spec, {} if self.demand is None else {self.spec.name: self.demand.replicas})


def _about(name: str) -> list[Call[Any]]:
    """The calls that read a _Model."""
    model = ModelKeys(name)
    return [
        catalog.spec_of(name),
        load_of(name),
        read("HMGET", model.assets, "created", "kv_tokens", "context_length", "vocab_size", parse=_mark),
        read("HMGET", model.assets, "created", "pooling", parse=_kind),
        catalog.replicas(name),
        backends(name),
        farm.demand_of(name),
    ]


def _of_replicas(model: _Model) -> list[Call[Any]]:
    """For each replica what `_replica` is made of."""
    calls: list[Call[Any]] = []
    place = model.spec.name
    for name, (_, tp) in _ranks_by_replica(model).items():
        calls += [holder(place, name), *look_at(place, name, tp)]
    return calls


def _overview(about: _Model, replies: Iterator[Any]) -> Overview:
    spec = about.spec
    published = about.assets is not None
    ranks = _ranks_by_replica(about)
    replicas = [
        _replica(spec, published, name, revision, list(islice(replies, 4 + tp)), about.backends.get(name))
        for name, (revision, tp) in ranks.items()
    ]
    state, detail = model_state(
        [(replica.state, replica.detail) for replica in replicas], spec.unload, asleep=about.wanted == 0
    )
    if state == "sleeping" and about.demand is not None and about.demand.detail:
        detail = about.demand.detail
    done = sum(one.state == "loaded" and one.revision == spec.revision for one in replicas)
    return Overview(
        model=spec.name,
        state=state,
        detail=detail,
        queued=about.load.queued,
        revision=spec.revision,
        wanted=about.wanted,
        rolled_out=done,
        assets=about.assets,
        replicas=replicas,
        paused=spec.paused,
        load=about.load,
        kind=about.kind,
        engine=spec.engine,
        scale=str(spec.replicas) if not spec.on_demand else f"{spec.least_replicas}..{spec.replicas}",
        settings=blake2b(msgspec.json.encode(spec), digest_size=6).hexdigest(),
    )


def _ranks_by_replica(about: _Model) -> dict[str, tuple[int, int]]:
    """Revision and number of ranks of every replica: those that were assigned, and those that are still to be."""
    spec = about.spec
    ranks = {name: (about.assigned[name].revision, about.assigned[name].tp) for name in in_order(about.assigned)}
    current = sum(revision == spec.revision for revision, _ in ranks.values())
    missing = 0 if spec.unload else max(0, about.wanted - current)
    return ranks | dict.fromkeys(islice(free_names(ranks), missing), (spec.revision, spec.group_size))


def _replica(
    spec: ModelSpec, published: bool, name: str, revision: int, replies: list[Any], backend: Backend | None
) -> ReplicaOverview:
    token = replies[0]
    look = Look.of(replies[1:])
    status = look.status
    epoch = look.epoch
    beats = look.beats
    view = ReplicaView(
        unload=spec.unload,
        published=published,
        served_before=backend is not None,
        status=status,
        epoch=epoch,
        locked=token is not None,
        poison=look.poison,
        beats=beats,
    )
    state, detail = replica_state(view)
    leader = beats[0]
    placed = status is not None and status.state != "unplaceable"  # else it names the host that planned
    hosts = dict.fromkeys(beat.host for beat in beats if beat is not None and beat.host)
    done, total = loading_bytes(state, status, [beat for beat in beats if beat is not None and beat.epoch == epoch])
    return ReplicaOverview(
        replica=name,
        revision=revision,
        state=state,
        detail=detail,
        host=",".join(hosts) or (status.host if status is not None and placed else ""),
        devices=[beat.device for beat in beats if beat is not None],
        epoch=epoch,
        seq=leader.seq if leader is not None and leader.epoch == epoch else 0,
        beats=beats,
        backend=backend,
        done_bytes=done,
        total_bytes=total,
        placed=bool(hosts) or placed,
        slow=slow_ranks(beats),
    )


def _kind(reply: list[str | None]) -> ModelKind | None:
    """None without assets, and where a later version wrote a kind that this one does not know."""
    created, pooling = reply
    if pooling is None:
        return None if created is None else "generate"
    try:
        return msgspec.json.decode(pooling, type=PoolingAssets).kind
    except msgspec.DecodeError:
        return None


def _mark(reply: list[str | None]) -> AssetsMark | None:
    return tuple(reply) if any(reply) else None


# --- Shared by the processes of an API -------------------------------------------------------------------------------

# The overviews as one API process reads them for all: in a large farm each reading is thousands of commands.


_decode = msgspec.json.Decoder(list[Overview]).decode


def shared_overviews(client: SyncRedis) -> list[Overview]:
    """As `overviews`, but up to about a second old: one caller in a second reads them, the others take what it wrote.

    Raises RedisUnavailable.
    """
    return run_steps(client, reading_shared())


def reading_shared() -> Steps[list[Overview]]:
    """The round trips of `shared_overviews`: one where another process has read them."""
    turn = write("SET", keys.OVERVIEWS_LOCK, "1", "NX", "PX", constants.ROUND_MS, parse=bool)
    stored = read("GET", keys.OVERVIEWS, parse=optional_text)
    mine, written, names = yield [turn, stored, catalog.names()]
    if not mine and written is not None:
        try:
            return _decode(written)
        except msgspec.DecodeError:  # of another version of Furrow
            pass
    models = yield from reading_overviews(names)
    text = msgspec.json.encode(models).decode()
    yield [write("SET", keys.OVERVIEWS, text, "PX", constants.OVERVIEWS_MS, parse=bool)]
    return models
