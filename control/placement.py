"""Placement as a pure function of state: (desired models, hosts, what is assigned) → what to change.

It is run again and again by the agent that holds the placement lock, until desired and actual are the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from control.messages import Assignment, ModelSpec


@dataclass(frozen=True, slots=True)
class Host:
    """A host whose agent beats. `devices` are its accelerators; every host can run CPU ranks."""

    id: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Assign:
    """Put `assignment` on the host, in place of what it may hold for this replica: never fewer ranks than that."""

    host: str
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take the replica from the host; its agent drains and stops the ranks."""

    host: str
    model: str
    replica: str


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """The living hosts don't have the devices; `why` names what is asked for and what there is."""

    model: str
    replica: str
    why: str


Action = Assign | Withdraw | Unplaceable


def replica_names(spec: ModelSpec) -> list[str]:
    return [f"r{index}" for index in range(spec.replicas)]


Parts = dict[str, Assignment]
"""Of one replica: the ranks that living hosts hold, by host id."""


def plan(specs: list[ModelSpec], hosts: list[Host], held: dict[str, list[Assignment]]) -> list[Action]:
    """What brings the farm nearer to `specs`.

    `held` maps a host id, living or not, to its assignments. A host that no longer beats loses what it holds; an
    assignment whose model has no spec at all stays, because absence never means unload. A host that was thought dead
    and comes back with ranks that another one has by now loses them.
    """
    wanted = {(spec.name, replica): spec for spec in specs if not spec.unload for replica in replica_names(spec)}
    known = {spec.name for spec in specs}
    room = Room(hosts)
    actions: list[Action] = []
    parts: dict[tuple[str, str], Parts] = {}
    leaving: set[tuple[str, str]] = set()
    for host_id, assignments in held.items():
        for assignment in assignments:
            place = (assignment.spec.name, assignment.replica)
            spec = wanted.get(place)
            others = parts.setdefault(place, {})
            obsolete = assignment.spec.name in known and (spec is None or spec.revision != assignment.spec.revision)
            twice = any(set(assignment.ranks) & set(part.ranks) for part in others.values())
            if host_id not in room.free or obsolete or twice:
                actions.append(Withdraw(host_id, *place))
            if host_id not in room.free:
                continue
            if obsolete or twice or assignment.withdrawn:
                leaving.add(place)  # its successor waits until the ranks have ended
            others[host_id] = assignment
            room.take(host_id, assignment.devices)
    for (model, replica), spec in wanted.items():
        if (model, replica) not in leaving:
            actions += _place(spec, replica, parts.get((model, replica), {}), room)
    return actions


class Room:
    """What the living hosts have left while a plan is made: `free` accelerators and a count of replicas, by host id."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self.free = {host.id: list(host.devices) for host in hosts}
        self.crowd: Counter[str] = Counter()

    def take(self, host_id: str, devices: list[str]) -> None:
        """One more replica, or a part of one, is on the host."""
        self.crowd[host_id] += 1
        self.free[host_id] = [device for device in self.free[host_id] if device not in devices]

    def emptiest(self) -> list[Host]:
        """Those with the fewest replicas first."""
        return sorted(self.hosts, key=lambda host: (self.crowd[host.id], host.id))

    def for_parts(self, parts: Parts) -> list[Host]:
        """Hosts that have a part of the replica already, then those with the most free devices, then the emptiest."""
        return sorted(self.emptiest(), key=lambda host: (host.id not in parts, -len(self.free[host.id])))


def _place(spec: ModelSpec, replica: str, parts: Parts, room: Room) -> list[Action]:
    """Give the ranks that nobody holds to one host if one has the devices, else to several."""
    there = {rank for part in parts.values() for rank in part.ranks}
    missing = [rank for rank in range(spec.tp) if rank not in there]
    if not missing:
        return []
    chosen = None if parts or spec.spread else _one_host(spec, room)
    chosen = chosen or _several_hosts(spec, missing, parts, room)
    if chosen is None:
        return [_unplaceable(spec, replica, room)]
    actions: list[Action] = []
    for host_id, given in chosen.items():
        room.take(host_id, list(given.values()))
        part = parts.get(host_id)
        devices = given | (dict(zip(part.ranks, part.devices, strict=True)) if part else {})
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
    return None if left else {host_id: given for host_id, given in chosen.items() if given}


def _device(spec: ModelSpec, rank: int, free: list[str], accelerated: bool) -> str | None:
    """What a host with these `free` devices has for the rank, or None."""
    if spec.devices:
        return spec.devices[rank] if spec.devices[rank] in ("cpu", *free) else None
    if not accelerated:
        return "cpu"
    return free[0] if free else None


def _unplaceable(spec: ModelSpec, replica: str, room: Room) -> Unplaceable:
    asked = ", ".join(spec.devices) or f"{spec.tp} devices of one kind"
    has = [f"{host.id} has {', '.join(room.free[host.id]) or 'cpu only'}" for host in room.hosts]
    there = "; ".join(has) or "no host is alive"
    return Unplaceable(
        spec.name, replica, f"asked for {asked}; {there}. Start a worker that has them, or change --devices"
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
