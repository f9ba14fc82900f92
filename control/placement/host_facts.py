"""The facts about a host that its agent publishes now and then, for `furrow doctor`."""

from __future__ import annotations

import msgspec

from control import keys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run_every, write

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
