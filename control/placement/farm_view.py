"""The desired models, their replicas and the hosts, read together in two round trips: for a turn of the planner."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass
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
    return FarmReader(client).read()


FRESH_S = 3.0
"""What was read longer ago says nothing: another agent may have planned since."""
WHOLE_EVERY_S = 10.0
"""Everything is read so often at least."""


class FarmReader:
    """Reads the farm turn by turn. Specifications are read again when one has changed."""

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        self._specs: dict[str, ModelSpec] = {}
        """Those of the last reading."""
        self._version: str | None = None
        self._without_replicas: set[str] = set()
        self._read_at = self._whole_at = -WHOLE_EVERY_S

    def forget(self, model: str) -> None:
        """The model has left the farm: one of its name is another one."""
        self._specs.pop(model, None)

    @property
    def is_fresh(self) -> bool:
        """True if what was read before may be used in this turn."""
        now = time.monotonic()
        return now - self._read_at < FRESH_S and now - self._whole_at < WHOLE_EVERY_S

    def read(self, quiet: Set[str] = frozenset()) -> FarmView:
        """`quiet`: models that sleep and have no requests; if they had no replica at the last turn they have none.
        Raises RedisUnavailable."""
        if not self.is_fresh:
            self._specs = {}
            self._without_replicas = set()
            self._whole_at = time.monotonic()
        members = (read("SMEMBERS", name, parse=set[str]) for name in (keys.MODELS, keys.HOSTS, keys.DRAINED))
        version, models, hosts, drained = run_every(self._client, [catalog.version(), *members])
        models = sorted(models)
        hosts = sorted(hosts)
        if version != self._version:
            self._specs = {}
        self._version = version
        idle = quiet & self._without_replicas
        awake = [name for name in models if name not in idle]
        unknown = [name for name in models if name not in self._specs]
        # A replica's name is written before its assignment.
        sections: list[list[Call[Any]]] = [
            [catalog.spec_of(name) for name in unknown],
            [catalog.replicas(name) for name in awake],
            [farm.assignments_of(name) for name in hosts],
            [farm.beat_of(name) for name in hosts],
            [farm.needs()],
        ]
        replies = iter(run_every(self._client, [call for section in sections for call in section]))
        specs, replicas, assignments, beats, [needs] = ([next(replies) for _ in section] for section in sections)
        specs_by_name = self._specs | dict(zip(unknown, specs, strict=True))
        self._specs = {name: specs_by_name[name] for name in models if specs_by_name[name] is not None}
        of_model = {name: list(own) for name, own in zip(awake, replicas, strict=True)}
        self._without_replicas = {name for name in models if not of_model.get(name)}
        self._read_at = time.monotonic()
        return FarmView(
            specs=list(self._specs.values()),
            replicas={name: of_model.get(name, []) for name in self._specs},
            held=dict(zip(hosts, assignments, strict=True)),
            hosts=[
                farm.host_of(name, beat, name in drained)
                for name, beat in zip(hosts, beats, strict=True)
                if beat is not None
            ],
            needs=needs,
        )
