"""The farm as the planner reads and changes it in Redis: which host was given which ranks, who plans, what models need
and what is demanded of them; and each host beside its assignments, as the operator sees it.

Every function raises RedisUnavailable while Redis is away.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import msgspec

from control import constants, keys
from control.errors import SettingsError
from control.messages import Assignment, ModelSpec, encode
from control.placement.demand import Demand
from control.placement.membership import (
    DeviceSpace,
    HostBeat,
    HostFacts,
    Machine,
    beat_of,
    facts_of,
    host_of,
    known_hosts,
)
from control.placement.need import DeviceRoom, ModelNeed
from control.placement.placement import Host
from control.records import catalog
from control.records.catalog import json_records
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every, write

_decode_assignment = msgspec.json.Decoder(Assignment).decode


def assignments_of(host_id: str) -> Call[list[Assignment]]:
    """The host's assignments, tombstones included."""

    def parse(reply: list[str]) -> list[Assignment]:
        return [_decode_assignment(value) for value in reply]

    return read("HVALS", keys.assignments(host_id), parse=parse)


def assignment_of(host_id: str, model: str, replica: str) -> Call[Assignment | None]:
    """The assignment of a replica's ranks to a host; None if it has none."""

    def parse(reply: str | None) -> Assignment | None:
        return None if reply is None else _decode_assignment(reply)

    return read("HGET", keys.assignments(host_id), f"{model} {replica}", parse=parse)


def assignments(client: SyncRedis, host_id: str) -> list[Assignment]:
    """As `assignments_of`, run."""
    return run(client, assignments_of(host_id))


def all_assignments(client: SyncRedis) -> dict[str, list[Assignment]]:
    """The assignments of every host that ever beat."""
    hosts = known_hosts(client)
    return dict(zip(hosts, run_every(client, [assignments_of(host) for host in hosts]), strict=True))


def assign(client: SyncRedis, host_id: str, assignment: Assignment) -> None:
    """Give the host a replica's ranks to run."""
    spec = assignment.spec
    field = f"{spec.name} {assignment.replica}"
    # Its name first: what was left behind under a name that nobody knows would never be looked for.
    run(
        client,
        catalog.put_replica(
            spec.name, assignment.replica, catalog.Assigned(revision=spec.revision, tp=spec.group_size)
        ),
    )
    run(client, write("HSET", keys.assignments(host_id), field, encode(assignment), parse=int))


def withdraw(client: SyncRedis, host_id: str, assignment: Assignment, at_once: bool = False) -> None:
    """Ask the host to drain and stop the ranks, or to stop them at once; it removes the assignment when it has."""
    assign(client, host_id, msgspec.structs.replace(assignment, withdrawn=True, at_once=at_once))


def drain_replica(client: SyncRedis, model: str, replica: str) -> list[tuple[str, Assignment]]:
    """Ask every part of the replica to go; (host, assignment) of each. Raises SettingsError if no host has it."""
    assigned = [
        (host, assignment) for host, assignments in all_assignments(client).items() for assignment in assignments
    ]
    parts = [(host, assignment) for host, assignment in assigned if assignment.place == (model, replica)]
    if not parts:
        names = sorted({assignment.replica for _, assignment in assigned if assignment.spec.name == model})
        raise SettingsError(f"model '{model}' has no replica '{replica}'; it has {', '.join(names) or 'none'}")
    for host, assignment in parts:
        withdraw(client, host, assignment)
    return parts


def remove_assignment(client: SyncRedis, host_id: str, model: str, replica: str) -> None:
    """The ranks have ended, or their host has."""
    run(client, read("HDEL", keys.assignments(host_id), f"{model} {replica}", parse=int))


def hold_placement(host_id: str) -> Call[bool]:
    """Take or keep the placement lock; one agent plans at a time, and a plan repeated is harmless. An agent that calls
    this between its turns hands the lock over to a process that waits for it."""
    return Call("hold", (keys.PLACEMENT_LOCK,), (host_id, constants.HEARTBEAT_MS, 0), bool)


def claim_placement(name: str) -> Call[bool]:
    """Take the placement lock, or wait for it: call again until it is True. `name` is used by no other process, and by
    this one once."""
    return Call("hold", (keys.PLACEMENT_LOCK,), (name, constants.HEARTBEAT_MS, 1), bool)


def release_placement(name: str) -> Call[bool]:
    """Give back the lock that was claimed under this name."""
    return Call("hold", (keys.PLACEMENT_LOCK,), (name, 1, 0), bool)


def put_need(model: str, need: ModelNeed) -> Call[int]:
    """Tell placement what memory a model needs."""
    return write("HSET", keys.NEEDS, model, encode(need).decode(), parse=int)


def forget_need(model: str) -> Call[int]:
    return read("HDEL", keys.NEEDS, model, parse=int)


def needs() -> Call[dict[str, ModelNeed]]:
    """By model; those that another version wrote in a form that this one can't read are left out."""
    return json_records(keys.NEEDS, ModelNeed)


def demand_of(model: str) -> Call[Demand | None]:
    """None where it was not looked at yet, and where another version wrote it in a form that this one can't read."""

    def parse(reply: str | None) -> Demand | None:
        try:
            return None if reply is None else msgspec.json.decode(reply, type=Demand)
        except msgspec.DecodeError:
            return None

    return read("GET", keys.ModelKeys(model).demand, parse=parse)


def put_demand(model: str, demand: Demand) -> Call[str]:
    """Keep it for the next turn, and for those who show it."""
    return write("SET", keys.ModelKeys(model).demand, encode(demand).decode(), parse=str)


def forget_demand(model: str) -> Call[int]:
    """Begin anew."""
    return read("DEL", keys.ModelKeys(model).demand, parse=int)


CALL_S = 30


def call_model(model: str) -> Call[str]:
    """Wake a model on demand without a request, as its requests are to follow."""
    return write("SET", keys.ModelKeys(model).call, "1", "EX", CALL_S, parse=str)


def is_called(model: str) -> Call[bool]:
    """True if the model was called lately."""
    return read("EXISTS", keys.ModelKeys(model).call, parse=bool)


class TenantTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant that waited for a model that sleeps, at a time of the server; `evicted`: others gave way for it."""

    tenant: str
    at_ms: int
    evicted: bool


TENANT_TURNS_MS = 60_000

TENANT_TURNS_LENGTH = 4096


def note_tenant(tenant: str, *, evicted: bool) -> list[Call[Any]]:
    """Remember it for TENANT_TURNS_MS."""
    fields = ("tenant", tenant, "evicted", int(evicted))
    return [
        write("XADD", keys.TENANT_TURNS, "MAXLEN", "~", TENANT_TURNS_LENGTH, "*", *fields, parse=str),
        write("PEXPIRE", keys.TENANT_TURNS, TENANT_TURNS_MS, parse=int),
    ]


def tenant_turns(since_ms: int) -> Call[list[TenantTurn]]:
    """Those since this time of the server, in their order."""

    def parse(reply: list[tuple[str, dict[str, str]]]) -> list[TenantTurn]:
        return [
            TenantTurn(
                tenant=fields.get("tenant", ""),
                at_ms=int(entry.partition("-")[0]),
                evicted=fields.get("evicted") == "1",
            )
            for entry, fields in reply
        ]

    return read("XRANGE", keys.TENANT_TURNS, since_ms, "+", parse=parse)


ON_DEMAND_S = 60
"""Seconds for which hosts keep a process from which ranks are forked after the agent that plans saw a model on
demand."""


def note_on_demand() -> Call[str]:
    """Tell all hosts that there are models on demand."""
    return write("SET", keys.ON_DEMAND, "1", "EX", ON_DEMAND_S, parse=str)


def has_on_demand() -> Call[bool]:
    """True if there are models on demand."""
    return read("EXISTS", keys.ON_DEMAND, parse=bool)


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a device of a host, in bytes; of `cpu` that of all CPU ranks together."""

    device: str
    given: int | None
    """Bytes that ranks may have together; None where memory is not planned."""
    assigned: int
    """Bytes of it that replicas were given, those that leave included."""
    left: int
    """Bytes that a rank may still be given: the rest, or the free memory where it is not planned."""
    free: int | None
    """Bytes that no process uses now; None if that is not known."""


class HostCard(msgspec.Struct, kw_only=True):
    """`alive`: its agent has a heartbeat; its ranks serve without one. `replicas`: assigned, as `model:replica`."""

    id: str
    alive: bool
    drained: bool
    version: str | None
    """Of its agent; None while that is away, and of one that does not tell it."""
    devices: list[str]
    engines: list[str]
    """External engines that it offers; empty while its agent is away."""
    replicas: list[str]
    memory: list[DeviceMemory] = []
    """Empty while its agent is away."""
    machine: Machine | None = None
    """None where it is not known."""
    accelerators: dict[str, DeviceSpace] = {}
    """The memory of each, as far as its driver tells."""
    assigned: dict[str, int] = {}
    """Bytes that its ranks of each of the `replicas` may take; none for those whose need is not known."""


def host_cards(client: SyncRedis) -> list[HostCard]:
    """Every known host with its assignments."""
    names = known_hosts(client)
    drained, *replies = run_every(
        client,
        [
            read("SMEMBERS", keys.DRAINED, parse=set),
            *map(beat_of, names),
            *map(assignments_of, names),
            *map(facts_of, names),
        ],
    )
    count = len(names)
    beats = replies[:count]
    assignments = replies[count : 2 * count]
    facts = replies[2 * count :]
    hosts = zip(names, beats, assignments, facts, strict=True)
    return [_host_card(name, name in drained, beat, own, host_facts) for name, beat, own, host_facts in hosts]


def _host_card(
    name: str, drained: bool, beat: HostBeat | None, assignments: list[Assignment], facts: HostFacts | None
) -> HostCard:
    by_replica = {f"{one.spec.name}:{one.replica}": one for one in assignments}
    return HostCard(
        id=name,
        alive=beat is not None,
        drained=drained,
        version=beat.version if beat is not None else None,
        devices=beat.devices if beat is not None else [],
        engines=beat.engines if beat is not None else [],
        replicas=sorted(by_replica),
        memory=_device_memory(beat, assignments, facts) if beat is not None else [],
        machine=facts.machine if facts is not None and beat is not None else None,
        accelerators=facts.devices if facts is not None and beat is not None else {},
        assigned={
            replica: sum(one.memory) + sum(one.device_memory)
            for replica, one in sorted(by_replica.items())
            if one.memory or one.device_memory
        },
    )


def _device_memory(beat: HostBeat, assignments: list[Assignment], facts: HostFacts | None) -> list[DeviceMemory]:
    assigned = Counter[str]()
    unknown = set[str]()
    for one in assignments:
        for device, size in zip(one.devices, one.memory, strict=False):
            assigned[device] += size
        for device, size in zip(one.devices, one.device_memory or [0] * len(one.devices), strict=True):
            assigned[device] += size
            if not size:
                unknown.add(device)
    limit = beat.memory
    left = beat.free if limit is None else max(0, limit - assigned["cpu"])
    memory = [DeviceMemory(device="cpu", given=limit, assigned=assigned["cpu"], left=left, free=beat.free)]
    spaces = facts.devices if facts is not None else {}
    for device in beat.devices:
        limit = beat.device_memory.get(device)
        space = spaces.get(device)
        if limit is not None:
            left = 0 if device in unknown else max(0, limit - assigned[device])
            free = space.free if space is not None else None
            memory.append(DeviceMemory(device=device, given=limit, assigned=assigned[device], left=left, free=free))
    return memory


def free_memory(client: SyncRedis) -> list[DeviceRoom]:
    """Bytes that ranks may still take of the devices of each host that beats now: of those that are planned what is not
    assigned, of the memory of others what is free."""
    return [DeviceRoom(card.id, memory.left, memory.device) for card in host_cards(client) for memory in card.memory]


def forget(client: SyncRedis, host_id: str) -> None:
    """Remove a host that will not come back from the lists; a worker that starts there is known again. Raises
    SettingsError for one that is unknown, beats or has replicas."""
    if host_id not in (hosts := known_hosts(client)):
        raise SettingsError(f"host '{host_id}' is unknown; known: {', '.join(hosts) or 'there is none'}")
    # A heartbeat without an end is of an older version, and of an agent that died before its second.
    if run(client, read("PTTL", keys.host(host_id), parse=int)) > 0:
        raise SettingsError(
            f"host '{host_id}' is alive; stop its worker first, and `furrow drain {host_id}` before that"
        )
    _refuse_with_replicas(client, host_id)
    removals = [read("SREM", key, host_id, parse=int) for key in (keys.HOSTS, keys.DRAINED)]
    run_every(client, [read("DEL", keys.host(host_id), parse=int), *removals])
    try:
        _refuse_with_replicas(client, host_id)
    except SettingsError:  # it came back for a moment, and was given one: only known hosts are looked at
        run(client, write("SADD", keys.HOSTS, host_id, parse=int))
        raise


def _refuse_with_replicas(client: SyncRedis, host_id: str) -> None:
    if replicas := [f"{one.spec.name}:{one.replica}" for one in assignments(client, host_id)]:
        raise SettingsError(
            f"host '{host_id}' has replicas: {', '.join(replicas[:5])}; `furrow drain {host_id}` moves them to others"
        )


@dataclass(frozen=True, slots=True)
class FarmView:
    """`hosts` are those whose agent beats; `by_host` has the assignments of every known host. `replicas` are those that
    each model of `specs` has in the catalog, read before the assignments. `needs` has the memory of models for which it
    is known."""

    specs: list[ModelSpec]
    replicas: dict[str, list[str]]
    by_host: dict[str, list[Assignment]]
    hosts: list[Host]
    needs: dict[str, ModelNeed]


def read_farm_view(client: SyncRedis) -> FarmView:
    """Raises RedisUnavailable."""
    return FarmReader(client).read()


FRESH_S = 3.0
"""An older view of the farm is read again, because another agent may have planned since."""

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
            [assignments_of(name) for name in hosts],
            [beat_of(name) for name in hosts],
            [needs()],
        ]
        replies = iter(run_every(self._client, [call for section in sections for call in section]))
        specs, replicas, assignments, beats, [model_needs] = ([next(replies) for _ in section] for section in sections)
        specs_by_name = self._specs | dict(zip(unknown, specs, strict=True))
        self._specs = {name: specs_by_name[name] for name in models if specs_by_name[name] is not None}
        of_model = {name: list(own) for name, own in zip(awake, replicas, strict=True)}
        self._without_replicas = {name for name in models if not of_model.get(name)}
        self._read_at = time.monotonic()
        return FarmView(
            specs=list(self._specs.values()),
            replicas={name: of_model.get(name, []) for name in self._specs},
            by_host=dict(zip(hosts, assignments, strict=True)),
            hosts=[
                host_of(name, beat, name in drained)
                for name, beat in zip(hosts, beats, strict=True)
                if beat is not None
            ],
            needs=model_needs,
        )
