"""Where ranks go: the rooms that hosts have, and the devices that a replica gets there. Data in, data out.

control/placement/rollout.py decides which replicas there shall be, and asks here for a place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from control.messages import Assignment, ModelSpec


@dataclass(frozen=True, slots=True)
class Host:
    """A host whose agent beats. `devices` are its accelerators; every host can run CPU ranks. A `drained` one gets
    nothing new, and what it has moves away."""

    id: str
    devices: tuple[str, ...] = ()
    drained: bool = False


@dataclass(frozen=True, slots=True)
class Assign:
    """Put `assignment` on the host, in place of what it may hold for this replica: never fewer ranks than that."""

    host: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take the replica from the host; its agent drains and stops the ranks, or stops them `at_once`."""

    host: str
    model: str
    replica: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """The living hosts don't have the devices; `why` names what is asked for and what there is."""

    model: str
    replica: str
    why: str


Action = Assign | Withdraw | Unplaceable


Parts = dict[str, Assignment]
"""The ranks of one replica that living hosts hold, by host id."""


class Room:
    """The capacity that is left while a plan is made: `free` accelerators and a count of replicas, by host id."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        self.hosts = [host for host in hosts if not host.drained]
        self.free = {host.id: list(host.devices) for host in self.hosts}
        self.crowd: Counter[str] = Counter()

    def take(self, host_id: str, devices: list[str]) -> None:
        """One more replica, or a part of one, is on the host."""
        self.crowd[host_id] += 1
        if host_id in self.free:
            self.free[host_id] = [device for device in self.free[host_id] if device not in devices]

    def without(self, parts: Parts) -> Room:
        """The capacity without the replica of these `parts`."""
        room = Room(self.hosts)
        room.crowd = self.crowd - Counter(parts.keys())
        for host in self.hosts:
            held = parts[host.id].devices if host.id in parts else []
            room.free[host.id] = [one for one in host.devices if one in self.free[host.id] or one in held]
        return room

    def emptiest(self) -> list[Host]:
        """Those with the fewest replicas first."""
        return sorted(self.hosts, key=lambda host: (self.crowd[host.id], host.id))

    def for_parts(self, parts: Parts) -> list[Host]:
        """Hosts that have a part of the replica already, then those with the most free devices, then the emptiest."""
        return sorted(self.emptiest(), key=lambda host: (host.id not in parts, -len(self.free[host.id])))


def place(spec: ModelSpec, replica: str, parts: Parts, room: Room) -> list[Action]:
    """Give the ranks that nobody holds to one host if one has the devices, else to several, and take them from `room`.

    Where no host has them the answer is one Unplaceable.
    """
    there = {rank for part in parts.values() for rank in part.ranks}
    missing = [rank for rank in range(spec.tp) if rank not in there]
    if not missing:
        return []
    chosen = None if parts or spec.spread else _one_host(spec, room)
    chosen = chosen or _several_hosts(spec, missing, parts, room)
    if chosen is None:
        return [_unplaceable(spec, replica, room)]
    actions: list[Action] = []
    for host_id, rank_devices in chosen.items():
        room.take(host_id, list(rank_devices.values()))
        part = parts.get(host_id)
        devices = rank_devices | (dict(zip(part.ranks, part.devices, strict=True)) if part else {})
        ranks = sorted(devices)
        assignment = Assignment(spec=spec, replica=replica, ranks=ranks, devices=[devices[rank] for rank in ranks])
        actions.append(Assign(host_id, assignment))
    return actions


def _one_host(spec: ModelSpec, room: Room) -> dict[str, dict[int, str]] | None:
    """All ranks with their devices on the host with the fewest replicas among those that have the devices."""
    for host in room.emptiest():
        devices = choose_devices(spec, host, room.free[host.id])
        if devices is not None:
            return {host.id: dict(enumerate(devices))}
    return None


def _several_hosts(spec: ModelSpec, missing: list[int], parts: Parts, room: Room) -> dict[str, dict[int, str]] | None:
    """The missing ranks over as few hosts as have the devices, or as evenly as they allow where the spec wants that.

    Without devices named, the ranks of a group are all of one kind: accelerators if any host has them, else the CPU.
    """
    kinds = {device.partition(":")[0] for part in parts.values() for device in part.devices}
    accelerated = kinds != {"cpu"} if kinds else any(host.devices for host in room.hosts)
    hosts = [host.id for host in room.for_parts(parts) if spec.devices or bool(host.devices) == accelerated]
    free = {host_id: list(room.free[host_id]) for host_id in hosts}
    chosen: dict[str, dict[int, str]] = {host_id: {} for host_id in hosts}
    left = list(missing)
    even = -(-spec.tp // len(hosts)) if spec.spread and hosts else spec.tp
    for most in (even, spec.tp):
        for host_id in hosts:
            have = len(parts[host_id].ranks) if host_id in parts else 0
            for rank in list(left):
                device = _device(spec, rank, free[host_id], accelerated)
                if device is not None and have + len(chosen[host_id]) < most:
                    chosen[host_id][rank] = device
                    free[host_id] = [other for other in free[host_id] if other != device]
                    left.remove(rank)
    return None if left else {host_id: rank_devices for host_id, rank_devices in chosen.items() if rank_devices}


def _device(spec: ModelSpec, rank: int, free: list[str], accelerated: bool) -> str | None:
    """The devices among `free` for the ranks of the spec, or None."""
    if spec.devices:
        return spec.devices[rank] if spec.devices[rank] in ("cpu", *free) else None
    if not accelerated:
        return "cpu"
    return free[0] if free else None


def _unplaceable(spec: ModelSpec, replica: str, room: Room) -> Unplaceable:
    needed = ", ".join(spec.devices) or f"{spec.tp} devices of one kind"
    has = [f"{host.id} has {', '.join(room.free[host.id]) or 'cpu only'}" for host in room.hosts]
    there = "; ".join(has) or "no host is alive"
    return Unplaceable(
        spec.name, replica, f"asked for {needed}; {there}. Start a worker that has them, or change --devices"
    )


def choose_devices(spec: ModelSpec, host: Host, free: list[str]) -> list[str] | None:
    """The devices on `host` for the ranks of one replica, or None.

    A spec that names devices gets exactly these. One that names none gets accelerators where the host has any, the CPU
    only where it has none: a missing GPU is never replaced silently.
    """
    if spec.devices:
        missing = [device for device in spec.devices if device != "cpu" and device not in free]
        return None if missing else list(spec.devices)
    if host.devices:
        return free[: spec.tp] if len(free) >= spec.tp else None
    return ["cpu"] * spec.tp
