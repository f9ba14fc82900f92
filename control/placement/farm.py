"""Hosts and what they were given to run, as Redis holds them. Read and written by agents; the operator reads along.
The planner reads them together with the desired models.

Every function raises RedisUnavailable while Redis is away.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from control import constants, keys
from control.clock import now_ms
from control.engines import OWN
from control.errors import RedisUnavailable, SettingsError
from control.messages import Assignment, ModelSpec, encode
from control.placement.demand import Demand
from control.placement.need import DeviceRoom, ModelNeed
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, optional_text, read, run, run_every, write
from control.version import VERSION

# --- Facts of a host -------------------------------------------------------------------------------------------------

# Published by its agent now and then, for `furrow doctor`.


LIFE_MS = 90_000
"""Life of the facts; published every sixth of it."""


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of a folder, in bytes; `free` is the part that this user can take."""

    path: str
    total: int
    free: int
    unwritable: str = ""
    """The reason why this user can make no file there; empty where it can."""


class DeviceSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of an accelerator, in bytes; `free` is what no process uses."""

    total: int
    free: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Processors and memory that a worker may use, within its control group, and the load of the last minute."""

    processors: int
    load: float
    memory: int
    """Bytes."""
    free: int
    """Bytes that no process uses, or that files hold and give back."""


class FilesHere(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The files of a model on a host: their fingerprint, or the reason why there is none."""

    fingerprint: str = ""
    error: str = ""


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that change slowly, gathered by the agent of a host beside its loop."""

    at_ms: int
    """The time of the collection, by Redis' clock."""
    version: str
    clock_ms: int
    """The host's clock minus that of Redis."""
    round_trip_ms: float
    models: Space | None
    """The folder of downloaded models; None where its file system does not answer."""
    cache: Space | None
    """The folder of packed weights and compiled libraries."""
    shared_memory: Space | None
    """/dev/shm; None where there is none."""
    compiler: str
    """The C++ compiler and its version; empty without one."""
    brought: str = ""
    """The library of the kernels that came with this package for this processor; empty without one."""
    native: str
    """The reason why the products and forwards in C++ can't be used; empty where they can."""
    kernels_off: list[str]
    """Kernels that are switched off, each with the reason."""
    files: dict[str, FilesHere]
    """By model, for all models of the farm; one whose files are still to be downloaded is absent."""
    machine: Machine | None = None
    """None of an agent that does not tell it."""
    devices: dict[str, DeviceSpace] = {}
    """By accelerator, as far as its driver tells."""
    program: str = ""
    """The command that SIGUSR2 to `furrow worker` runs, without its arguments; empty where no command started it."""
    old_ranks: dict[str, str] = {}
    """Ranks of other builds than the agent's, as `model:replica rank N` → the version."""
    address: str = ""
    """The address that ranks on other hosts are told, while this host has a part of a replica."""
    port: int = 0
    """A port there that accepts connections of other agents; 0 for none."""
    ports: dict[str, str] = {}
    """Hosts with another part of a replica of this one → the error of a connection there, empty for none."""


def put_facts(host_id: str, facts: HostFacts) -> Call[bool]:
    """Publish the facts for LIFE_MS."""
    text = msgspec.json.encode(facts).decode()
    return write("SET", keys.host_facts(host_id), text, "PX", LIFE_MS, parse=bool)


def facts_of(host_id: str) -> Call[HostFacts | None]:
    """None where there are none, or where they are those of a version that this one does not understand."""

    def parse(reply: str | None) -> HostFacts | None:
        try:
            return msgspec.json.decode(reply, type=HostFacts) if reply else None
        except msgspec.DecodeError:
            return None

    return read("GET", keys.host_facts(host_id), parse=parse)


def facts_of_all(client: SyncRedis, hosts: list[str]) -> dict[str, HostFacts | None]:
    """The facts of each of these hosts. Raises RedisUnavailable."""
    return dict(zip(hosts, run_every(client, [facts_of(name) for name in hosts]), strict=True))


Record = TypeVar("Record")

NAME_GRACE_S = 1.0
"""Added to a heartbeat's life before a name counts as taken."""
NAME_LOOK_S = 0.1

_decode_assignment = msgspec.json.Decoder(Assignment).decode


def host_beat(host: Host, pid: int, memory_bytes: int, standby: str = "off") -> list[Call[int]]:
    """The calls of an agent's heartbeat: its version, its devices, the free memory, and the state of its standby."""
    key = keys.host(host.id)
    words = ("version", VERSION, "devices", ",".join(host.devices), "pid", pid, "memory_bytes", memory_bytes)
    memory: tuple[str | int, ...] = ()
    if host.memory is not None:
        memory = "memory", host.memory, "memory_dedicated", int(host.dedicated)
    if host.device_memory:
        memory += "device_memory", encode(host.device_memory).decode()
    engines = ("engines", ",".join((OWN, *host.engines)))
    return [
        write("SADD", keys.HOSTS, host.id, parse=int),
        write("HSET", key, *words, *memory, *engines, "standby", standby, parse=int),
        _end(key),
    ]


def _end(key: str) -> Call[int]:
    """The end of a heartbeat, sent after it. It is a script as well: a server that has no scripts yet gets both anew,
    in their order, where a plain command would have run before the heartbeat was there."""
    return write("PEXPIRE", key, constants.HEARTBEAT_MS, parse=int)


def beat_host(client: SyncRedis, host: Host, pid: int, memory_bytes: int) -> None:
    """As `host_beat`, run."""
    run_every(client, host_beat(host, pid, memory_bytes))


def check_name(client: SyncRedis, host_id: str) -> None:
    """For a worker that starts: the last heartbeat of one that has ended is waited for. Raises SettingsError where
    another worker goes on beating under the name: both would run the same ranks, and poison each other's epochs."""
    until = time.monotonic() + constants.HEARTBEAT_MS / 1000 + NAME_GRACE_S
    while True:
        # Without Redis nobody beats: the agent waits for it later, as a running one does.
        with suppress(RedisUnavailable):
            key = keys.host(host_id)
            look = [read("HGET", key, "pid", parse=optional_text), read("PTTL", key, parse=int)]
            pid, left_ms = run_every(client, look)
            if pid is None:
                return
            # One without an end is of an older version, whose first on a new server had none.
            if time.monotonic() > until and left_ms > 0:
                raise SettingsError(
                    f"another worker runs as host '{host_id}' (its agent has pid {pid} on its machine). "
                    "Stop that one, or name this one with --host-id"
                )
        if time.monotonic() > until + NAME_GRACE_S:
            return
        time.sleep(NAME_LOOK_S)


def known_hosts(client: SyncRedis) -> list[str]:
    """Every host that ever beat, in order of name."""
    return run(client, read("SMEMBERS", keys.HOSTS, parse=sorted))


def standbys(client: SyncRedis) -> list[str]:
    """The state of each living host's standby process: off, starting or ready."""
    hosts = known_hosts(client)
    said = run_every(client, [read("HGET", keys.host(name), "standby", parse=optional_text) for name in hosts])
    return [word for word in said if word]


def agents(client: SyncRedis) -> dict[str, int]:
    """The pid of the agent of each host that beats now."""
    hosts = known_hosts(client)
    pids = run_every(client, [read("HGET", keys.host(name), "pid", parse=optional_text) for name in hosts])
    return {host: int(pid) for host, pid in zip(hosts, pids, strict=True) if pid is not None}


def living_hosts(client: SyncRedis) -> list[Host]:
    """The hosts whose agent beats now."""
    names = known_hosts(client)
    drained, *beats = run_every(client, [read("SMEMBERS", keys.DRAINED, parse=set), *map(beat_of, names)])
    return [host_of(name, beat, name in drained) for name, beat in zip(names, beats, strict=True) if beat is not None]


class HostBeat(msgspec.Struct, frozen=True, kw_only=True):
    """The heartbeat of an agent. An older version tells no `version` or no `memory`."""

    devices: list[str]
    version: str | None = None
    memory: int | None = None
    """Bytes that the CPU ranks of the host may have together; None where it does not plan them."""
    dedicated: bool = False
    """True if that memory is for ranks alone."""
    device_memory: dict[str, int] = {}
    """Bytes that the ranks on each accelerator may have together; empty where they are not planned."""
    free: int = 0
    """Bytes of the host's memory that are free."""
    engines: list[str] = []
    """External engines that it offers."""


def beat_of(host_id: str) -> Call[HostBeat | None]:
    """None without a heartbeat."""

    def parse(reply: list[str | None]) -> HostBeat | None:
        devices, version, memory, dedicated, device_memory, free, engines = reply
        if devices is None:
            return None
        return HostBeat(
            devices=[device for device in devices.split(",") if device],
            version=version,
            memory=None if memory is None else int(memory),
            dedicated=dedicated == "1",
            device_memory=msgspec.json.decode(device_memory or "{}", type=dict[str, int]),
            free=int(free or 0),
            engines=[engine for engine in (engines or OWN).split(",") if engine != OWN],
        )

    fields = ("devices", "version", "memory", "memory_dedicated", "device_memory", "memory_bytes", "engines")
    return read("HMGET", keys.host(host_id), *fields, parse=parse)


def host_of(name: str, beat: HostBeat, drained: bool) -> Host:
    """The host with this heartbeat."""
    return Host(
        name, tuple(beat.devices), drained, beat.memory, beat.dedicated, beat.device_memory, tuple(beat.engines)
    )


def put_need(model: str, need: ModelNeed) -> Call[int]:
    """Tell placement what memory a model needs."""
    return write("HSET", keys.NEEDS, model, encode(need).decode(), parse=int)


def forget_need(model: str) -> Call[int]:
    return read("HDEL", keys.NEEDS, model, parse=int)


def needs() -> Call[dict[str, ModelNeed]]:
    """By model; those that another version wrote in a form that this one can't read are left out."""
    return _records(keys.NEEDS, ModelNeed)


def _records(key: str, kind: type[Record]) -> Call[dict[str, Record]]:
    """The records of a hash that can be read as `kind`, by field."""

    def parse(reply: dict[str, str]) -> dict[str, Record]:
        records: dict[str, Record] = {}
        for field, text in reply.items():
            with suppress(msgspec.DecodeError):
                records[field] = msgspec.json.decode(text, type=kind)
        return records

    return read("HGETALL", key, parse=parse)


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


CALL_S = 30


def call_model(model: str) -> Call[str]:
    """Wake a model on demand without a request, as its requests are to follow."""
    return write("SET", keys.ModelKeys(model).call, "1", "EX", CALL_S, parse=str)


def is_called(model: str) -> Call[bool]:
    """True if the model was called lately."""
    return read("EXISTS", keys.ModelKeys(model).call, parse=bool)


def forget_demand(model: str) -> Call[int]:
    """Begin anew."""
    return read("DEL", keys.ModelKeys(model).demand, parse=int)


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
    own = zip(names, beats, assignments, facts, strict=True)
    return [_host_card(name, name in drained, beat, held, host_facts) for name, beat, held, host_facts in own]


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


def drained_hosts(client: SyncRedis) -> set[str]:
    """Those that get nothing new."""
    return run(client, read("SMEMBERS", keys.DRAINED, parse=set))


def beat_api(api_id: str, url: str, started: int) -> list[Call[int]]:
    """The calls of an API process's heartbeat: its version, address and start."""
    key = keys.api(api_id)
    return [
        write("SADD", keys.APIS, api_id, parse=int),
        write("HSET", key, "url", url, "version", VERSION, "started", started, parse=int),
        _end(key),
    ]


def living_apis(client: SyncRedis) -> list[str]:
    """Ids of the API processes that beat now."""
    ids = run(client, read("SMEMBERS", keys.APIS, parse=sorted))
    beats = run_every(client, [read("EXISTS", keys.api(name), parse=bool) for name in ids])
    return [name for name, beat in zip(ids, beats, strict=True) if beat]


def api_versions(client: SyncRedis) -> dict[str, str]:
    """The version of each API process that beats now, by its id; empty for one that does not tell it."""
    ids = run(client, read("SMEMBERS", keys.APIS, parse=sorted))
    calls = [read("HMGET", keys.api(name), "started", "version", parse=list) for name in ids]
    records = dict(zip(ids, run_every(client, calls), strict=True))
    return {name: version or "" for name, (started, version) in records.items() if started is not None}


class ApiRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An API process as it tells of itself every API_RECORD_S; what is left of one that ended without a stop."""

    url: str
    host: str
    pid: int
    at_ms: int
    """By the clock of its host."""


API_RECORD_S = 10.0
API_RECORD_LIFE_MS = 3_600_000


def put_api_record(api_id: str, record: ApiRecord) -> Call[int]:
    return write("HSET", keys.API_RECORDS, api_id, msgspec.json.encode(record).decode(), parse=int)


def drop_api_records(*api_ids: str) -> Call[int]:
    """Of processes that stop, or whose record is too old to be of use."""
    return read("HDEL", keys.API_RECORDS, *api_ids, parse=int)


def api_records() -> Call[dict[str, ApiRecord]]:
    """By id; those that can't be read, as of another version, are left out."""
    return _records(keys.API_RECORDS, ApiRecord)


def silent_apis(client: SyncRedis, beating: Collection[str]) -> list[ApiRecord]:
    """API processes that were there within the last hour, were not stopped, and do not beat; without those whose
    address another process has by now. `beating`: the ids of those that beat."""
    records = run(client, api_records())
    served = {record.url for api_id, record in records.items() if api_id in beating}
    oldest = now_ms() - API_RECORD_LIFE_MS
    return [
        record
        for api_id, record in records.items()
        if api_id not in beating and record.url not in served and record.at_ms > oldest
    ]


def drain(client: SyncRedis, host_id: str, drained: bool = True) -> bool:
    """Keep replicas away from the host and let those that it has move, or undo that; False if nothing changed."""
    return run(client, read("SADD" if drained else "SREM", keys.DRAINED, host_id, parse=bool))


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
    gone = [read("SREM", name, host_id, parse=int) for name in (keys.HOSTS, keys.DRAINED)]
    run_every(client, [read("DEL", keys.host(host_id), parse=int), *gone])
    try:
        _refuse_with_replicas(client, host_id)
    except SettingsError:  # it came back for a moment, and was given one: only known hosts are looked at
        run(client, write("SADD", keys.HOSTS, host_id, parse=int))
        raise


def _refuse_with_replicas(client: SyncRedis, host_id: str) -> None:
    if held := [f"{one.spec.name}:{one.replica}" for one in assignments(client, host_id)]:
        raise SettingsError(
            f"host '{host_id}' has replicas: {', '.join(held[:5])}; `furrow drain {host_id}` moves them to others"
        )


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
    held = [(host, one) for host, assignments in all_assignments(client).items() for one in assignments]
    parts = [(host, one) for host, one in held if one.place == (model, replica)]
    if not parts:
        names = sorted({one.replica for _, one in held if one.spec.name == model})
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


# --- Farm view -------------------------------------------------------------------------------------------------------

# The desired models, their replicas and the hosts, read together in two round trips: for a turn of the planner.


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
            held=dict(zip(hosts, assignments, strict=True)),
            hosts=[
                host_of(name, beat, name in drained)
                for name, beat in zip(hosts, beats, strict=True)
                if beat is not None
            ],
            needs=model_needs,
        )
