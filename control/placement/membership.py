"""The reports by which hosts and API processes tell that they are there: heartbeats, and the facts of hosts that change
slowly. Agents and API processes write them; the planner and the operator read them.

Every function raises RedisUnavailable while Redis is away.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

import msgspec

from control import constants, keys
from control.clock import now_ms
from control.engines import OWN
from control.errors import RedisUnavailable, SettingsError
from control.messages import encode
from control.placement.placement import Host
from control.records.catalog import json_records
from control.redis.clients import SyncRedis
from control.redis.connection import Call, optional_text, read, run, run_every, write
from control.version import VERSION

NAME_GRACE_S = 1.0
"""Added to a heartbeat's life before a name counts as taken."""

NAME_LOOK_S = 0.1


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


def living_hosts(client: SyncRedis) -> list[Host]:
    """The hosts whose agent beats now."""
    names = known_hosts(client)
    drained, *beats = run_every(client, [read("SMEMBERS", keys.DRAINED, parse=set), *map(beat_of, names)])
    return [host_of(name, beat, name in drained) for name, beat in zip(names, beats, strict=True) if beat is not None]


def standbys(client: SyncRedis) -> list[str]:
    """The state of each living host's standby process: off, starting or ready."""
    hosts = known_hosts(client)
    states = run_every(client, [read("HGET", keys.host(name), "standby", parse=optional_text) for name in hosts])
    return [state for state in states if state]


def agents(client: SyncRedis) -> dict[str, int]:
    """The pid of the agent of each host that beats now."""
    hosts = known_hosts(client)
    pids = run_every(client, [read("HGET", keys.host(name), "pid", parse=optional_text) for name in hosts])
    return {host: int(pid) for host, pid in zip(hosts, pids, strict=True) if pid is not None}


def drained_hosts(client: SyncRedis) -> set[str]:
    """Those that get nothing new."""
    return run(client, read("SMEMBERS", keys.DRAINED, parse=set))


def drain(client: SyncRedis, host_id: str, drained: bool = True) -> bool:
    """Keep replicas away from the host and let those that it has move, or undo that; False if nothing changed."""
    return run(client, read("SADD" if drained else "SREM", keys.DRAINED, host_id, parse=bool))


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


class ApiRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record that an API process writes of itself every API_RECORD_S. One that ends without a stop leaves it."""

    url: str
    host: str
    pid: int
    at_ms: int
    """By the clock of its host."""


API_RECORD_S = 10.0

API_RECORD_LIFE_MS = 3_600_000


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


def put_api_record(api_id: str, record: ApiRecord) -> Call[int]:
    return write("HSET", keys.API_RECORDS, api_id, msgspec.json.encode(record).decode(), parse=int)


def drop_api_records(*api_ids: str) -> Call[int]:
    """Of processes that stop, or whose record is too old to be of use."""
    return read("HDEL", keys.API_RECORDS, *api_ids, parse=int)


def api_records() -> Call[dict[str, ApiRecord]]:
    """By id; those that can't be read, as of another version, are left out."""
    return json_records(keys.API_RECORDS, ApiRecord)


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
