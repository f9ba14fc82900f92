"""Hosts and what they were given to run, as Redis holds them. Read and written by agents; the operator reads along."""

from __future__ import annotations

import msgspec
import redis

from control import keys
from control.messages import Assignment, encode
from control.placement import Host

_decode_assignment = msgspec.json.Decoder(Assignment).decode


def beat_host(client: redis.Redis, host: Host, pid: int, memory_bytes: int) -> None:
    """Say that the host's agent lives, and what devices it has."""
    key = keys.host(host.id)
    pipe = client.pipeline(transaction=True)
    pipe.sadd(keys.HOSTS, host.id)
    pipe.hset(key, mapping={"devices": ",".join(host.devices), "pid": pid, "memory_bytes": memory_bytes})
    pipe.pexpire(key, keys.HEARTBEAT_MS)
    pipe.execute()


def known_hosts(client: redis.Redis) -> list[str]:
    """Every host that ever beat, in order of name."""
    return sorted(client.smembers(keys.HOSTS))


def living_hosts(client: redis.Redis) -> list[Host]:
    """The hosts whose agent beats now."""
    names = known_hosts(client)
    pipe = client.pipeline(transaction=False)
    for name in names:
        pipe.hget(keys.host(name), "devices")
    found = zip(names, pipe.execute(), strict=True)
    return [Host(name, tuple(filter(None, devices.split(",")))) for name, devices in found if devices is not None]


def assignments(client: redis.Redis, host_id: str) -> list[Assignment]:
    """What the host holds, tombstones included."""
    return [_decode_assignment(value) for value in client.hvals(keys.assignments(host_id))]


def _field(model: str, replica: str) -> str:
    return f"{model} {replica}"


def assign(client: redis.Redis, host_id: str, assignment: Assignment) -> None:
    """Give the host a replica's ranks to run."""
    field = _field(assignment.spec.name, assignment.replica)
    client.hset(keys.assignments(host_id), field, encode(assignment))


def withdraw(client: redis.Redis, host_id: str, assignment: Assignment) -> None:
    """Ask the host to drain and stop the ranks; it removes the assignment when that is done."""
    assign(client, host_id, msgspec.structs.replace(assignment, withdrawn=True))


def remove_assignment(client: redis.Redis, host_id: str, model: str, replica: str) -> None:
    """The ranks have ended, or their host has."""
    client.hdel(keys.assignments(host_id), _field(model, replica))


def hold_placement(client: redis.Redis, host_id: str) -> bool:
    """Take or keep the placement lock; one agent plans at a time, and a plan repeated is harmless."""
    if client.set(keys.PLACEMENT_LOCK, host_id, nx=True, px=keys.HEARTBEAT_MS):
        return True
    if client.get(keys.PLACEMENT_LOCK) != host_id:
        return False
    return bool(client.pexpire(keys.PLACEMENT_LOCK, keys.HEARTBEAT_MS))
