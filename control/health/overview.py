"""The state of every model and replica, read in two round trips: for the operator, for /ready and for refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from control import catalog
from control.clients import SyncRedis
from control.connection import Call, read, run_every
from control.health.beats import Beat, epoch_of, read_beat
from control.health.poisoning import poison_of
from control.health.state import ReplicaState, ReplicaView, model_state, replica_state
from control.health.status import status_of
from control.keys import ModelKeys
from control.lease import holder
from control.messages import ModelSpec
from control.placement import replica_names


@dataclass(frozen=True, slots=True)
class ReplicaOverview:
    """`seq` is the leader's last completed step; `devices` and `beats` are by rank, as far as they are heard; `host`
    names the hosts of those that are, comma between."""

    replica: str
    state: ReplicaState
    detail: str
    host: str
    devices: list[str]
    epoch: int
    seq: int
    beats: list[Beat | None]


@dataclass(frozen=True, slots=True)
class Overview:
    """`queued` requests wait for the model; `revision` is its specification's."""

    model: str
    state: ReplicaState
    detail: str
    queued: int
    revision: int
    replicas: list[ReplicaOverview]


def overviews(client: SyncRedis) -> list[Overview]:
    """Every model that the farm knows, in order of name. Raises RedisUnavailable."""
    return [_overview(client, spec) for spec in catalog.list_specs(client)]


def overview(client: SyncRedis, model: str) -> Overview:
    """One model; an unknown one is loading, with the reason. Raises RedisUnavailable."""
    spec = catalog.get_spec(client, model)
    if spec is None:
        return Overview(model, "loading", "the farm does not know the model yet", 0, 0, [])
    return _overview(client, spec)


def _overview(client: SyncRedis, spec: ModelSpec) -> Overview:
    model = ModelKeys(spec.name)
    calls: list[Call[Any]] = [
        read("HGET", model.load, "queued", parse=_count),
        read("EXISTS", model.assets, parse=bool),
    ]
    names = replica_names(spec)
    for name in names:
        calls += [status_of(spec.name, name), epoch_of(spec.name, name), holder(spec.name, name)]
        calls += [poison_of(spec.name, name), *(read_beat(spec.name, name, rank) for rank in range(spec.tp))]
    found = run_every(client, calls)
    queued, served = found[:2]
    width = 4 + spec.tp
    replicas = [
        _replica(spec, served, name, found[2 + width * i : 2 + width * (i + 1)]) for i, name in enumerate(names)
    ]
    state, detail = model_state([(replica.state, replica.detail) for replica in replicas])
    return Overview(spec.name, state, detail, queued, spec.revision, replicas)


def _replica(spec: ModelSpec, served: bool, name: str, found: list[Any]) -> ReplicaOverview:
    status, epoch, token, poison, *beats = found
    view = ReplicaView(spec.unload, served, status, epoch, token is not None, poison, beats)
    state, detail = replica_state(view)
    leader: Beat | None = beats[0]
    hosts = dict.fromkeys(beat.host for beat in beats if beat is not None and beat.host)
    return ReplicaOverview(
        replica=name,
        state=state,
        detail=detail,
        host=",".join(hosts) or (status.host if status else ""),
        devices=[beat.device for beat in beats if beat is not None],
        epoch=epoch,
        seq=leader.seq if leader is not None and leader.epoch == epoch else 0,
        beats=beats,
    )


def _count(reply: str | None) -> int:
    return max(0, int(reply or 0))
