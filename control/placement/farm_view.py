"""The desired models, their replicas and the hosts, read together in two round trips: for a turn of the planner."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from control import keys
from control.messages import Assignment, ModelSpec
from control.placement import farm
from control.placement.need import ModelNeed
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run_every


@dataclass(frozen=True, slots=True)
class FarmView:
    """`hosts` are those whose agent beats; `held` has the assignments of every known host. `replicas` are those that
    each model of `specs` has in the catalog, read before the assignments. `needs` has the memory of models for which it
    is known."""

    specs: list[ModelSpec]
    replicas: dict[str, list[str]]
    held: dict[str, list[Assignment]]
    hosts: list[Host]
    needs: dict[str, ModelNeed]


def read_farm_view(client: SyncRedis) -> FarmView:
    """Raises RedisUnavailable."""
    members = (read("SMEMBERS", name, parse=set[str]) for name in (keys.MODELS, keys.HOSTS, keys.DRAINED))
    models, hosts, drained = run_every(client, list(members))
    models = sorted(models)
    hosts = sorted(hosts)
    # A replica's name is written before its assignment.
    calls: list[Call[Any]] = [
        *(catalog.spec_of(name) for name in models),
        *(catalog.replicas(name) for name in models),
        *(farm.assignments_of(name) for name in hosts),
        *map(farm.beat_of, hosts),
        farm.needs(),
    ]
    replies = iter(run_every(client, calls))
    specs, replicas = ([*islice(replies, len(models))] for _ in range(2))
    held, beats = ([*islice(replies, len(hosts))] for _ in range(2))
    return FarmView(
        specs=[spec for spec in specs if spec is not None],
        replicas={name: list(one) for name, spec, one in zip(models, specs, replicas, strict=True) if spec is not None},
        held=dict(zip(hosts, held, strict=True)),
        hosts=[
            farm.host_of(name, beat, name in drained)
            for name, beat in zip(hosts, beats, strict=True)
            if beat is not None
        ],
        needs=next(replies),
    )
