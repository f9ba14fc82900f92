"""The state of every model and replica, which follows from what Redis holds. The operator, /ready, refusals and the
rollout of a change need it. Up to 64 models are read in two round trips, after one for their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any, Literal

import msgspec

from control import constants, keys
from control.engines import OWN
from control.keys import CLASSES, ModelKeys
from control.messages import ModelKind, ModelSpec, PoolingAssets
from control.placement import farm
from control.placement.demand import Demand
from control.placement.placement import replica_count
from control.placement.rollout import free_names, in_order
from control.records import catalog
from control.records.backend import Backend, backends
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Steps, optional_text, read, run_steps, write
from control.replicas.health import Beat, Look, Poison, Status, look_at, slow_ranks
from control.replicas.lease import holder

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
    def desired_replicas(self) -> int:
        """The number of replicas that are to run now."""
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
        [(replica.state, replica.detail) for replica in replicas], spec.unload, asleep=about.desired_replicas == 0
    )
    if state == "sleeping" and about.demand is not None and about.demand.detail:
        detail = about.demand.detail
    rolled_out = sum(replica.state == "loaded" and replica.revision == spec.revision for replica in replicas)
    return Overview(
        model=spec.name,
        state=state,
        detail=detail,
        queued=about.load.queued,
        revision=spec.revision,
        wanted=about.desired_replicas,
        rolled_out=rolled_out,
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
    missing = 0 if spec.unload else max(0, about.desired_replicas - current)
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
    done_bytes, total_bytes = loading_bytes(
        state, status, [beat for beat in beats if beat is not None and beat.epoch == epoch]
    )
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
        done_bytes=done_bytes,
        total_bytes=total_bytes,
        placed=bool(hosts) or placed,
        slow=slow_ranks(beats),
    )


_decode = msgspec.json.Decoder(list[Overview]).decode


def shared_overviews(client: SyncRedis) -> list[Overview]:
    """As `overviews`, but up to about a second old: one caller in a second reads them, the others take what it wrote.

    Raises RedisUnavailable.
    """
    return run_steps(client, reading_shared())


def reading_shared() -> Steps[list[Overview]]:
    """The round trips of `shared_overviews`: one where another process has read them. In a large farm each reading is
    thousands of commands."""
    turn = write("SET", keys.OVERVIEWS_LOCK, "1", "NX", "PX", constants.ROUND_MS, parse=bool)
    stored = read("GET", keys.OVERVIEWS, parse=optional_text)
    is_reader, stored_text, names = yield [turn, stored, catalog.names()]
    if not is_reader and stored_text is not None:
        try:
            return _decode(stored_text)
        except msgspec.DecodeError:  # of another version of Furrow
            pass
    models = yield from reading_overviews(names)
    text = msgspec.json.encode(models).decode()
    yield [write("SET", keys.OVERVIEWS, text, "PX", constants.OVERVIEWS_MS, parse=bool)]
    return models
