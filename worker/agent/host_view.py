"""The state of one host's replicas as Redis holds it, read in one round trip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from control.messages import Assignment
from control.placement import farm
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run_every
from control.replicas.health import Look, look_at

Place = tuple[str, str]
"""Model and replica."""


@dataclass(frozen=True, slots=True)
class HostView:
    """The host's assignments, withdrawn ones included, and a look at each replica that was asked for."""

    assignments: dict[Place, Assignment]
    looks: dict[Place, Look]


def read_host(
    client: SyncRedis, host_id: str, worlds: Mapping[Place, int], first: Sequence[Call[Any]] = ()
) -> tuple[list[Any], HostView]:
    """The answers to `first`, which are sent before in the same round trip, and the view. `worlds` maps the replicas to
    look at to their numbers of ranks. Raises RedisUnavailable."""
    calls = {place: look_at(*place, ranks) for place, ranks in worlds.items()}
    rest = iter(run_every(client, [*first, farm.assignments_of(host_id), *chain(*calls.values())]))
    answers, given = [*islice(rest, len(first))], next(rest)
    return answers, HostView(
        assignments={(one.spec.name, one.replica): one for one in given},
        looks={place: Look.of(list(islice(rest, len(parts)))) for place, parts in calls.items()},
    )
