"""The state of one host's replicas as Redis holds it, read in one round trip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from control.messages import Assignment
from control.placement import farm
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run_every
from control.replicas.health import Look, look_at

Place = tuple[str, str]
"""Model and replica."""


@dataclass(frozen=True, slots=True)
class HostView:
    """The host's assignments, withdrawn ones included, a look at each replica that was asked for, and those of their
    models whose specification or name Redis has lost."""

    assignments: dict[Place, Assignment]
    looks: dict[Place, Look]
    lost_specs: frozenset[str] = frozenset()


def read_host(
    client: SyncRedis, host_id: str, worlds: Mapping[Place, int], first: Sequence[Call[Any]] = ()
) -> tuple[list[Any], HostView]:
    """The answers to `first`, which are sent before in the same round trip, and the view. `worlds` maps the replicas to
    look at to their numbers of ranks. Raises RedisUnavailable."""
    calls = {place: look_at(*place, ranks) for place, ranks in worlds.items()}
    models = sorted({model for model, _ in worlds})
    there = [catalog.is_there(model) for model in models]
    rest = iter(run_every(client, [*first, farm.assignments_of(host_id), *chain(*calls.values()), *chain(*there)]))
    answers, assignments = [*islice(rest, len(first))], next(rest)
    looks = {place: Look.of(list(islice(rest, len(parts)))) for place, parts in calls.items()}
    return answers, HostView(
        assignments={(one.spec.name, one.replica): one for one in assignments},
        looks=looks,
        lost_specs=frozenset(
            model for model, parts in zip(models, there, strict=True) if not all(list(islice(rest, len(parts))))
        ),
    )
