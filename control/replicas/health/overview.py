"""The state of every model and replica, read in a few round trips: for the operator, for /ready, for refusals, and for
the rollout of a change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Any

import msgspec

from control.engines import OWN
from control.keys import ModelKeys
from control.messages import ModelKind, ModelSpec, PoolingAssets
from control.placement import farm
from control.placement.demand import Demand
from control.placement.placement import count_of
from control.placement.rollout import free_names, in_order
from control.records import catalog
from control.records.backend import Backend, backends
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Steps, read, run_steps
from control.replicas.health.beats import Beat
from control.replicas.health.load import ModelLoad, load_of
from control.replicas.health.look import Look, look_at
from control.replicas.health.slow import slow_ranks
from control.replicas.health.state import ReplicaState, ReplicaView, loading_bytes, model_state, replica_state
from control.replicas.lease import holder

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
        """When its assets were published first, in seconds since 1970; 0 without."""
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
        return count_of(self.spec, {} if self.demand is None else {self.spec.name: self.demand.replicas})


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
