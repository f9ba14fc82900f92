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
    """Put `assignment` on the host, in place of what it may hold for this replica."""

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
    """No living host has the devices; `why` names what is asked for and what there is."""

    model: str
    replica: str
    why: str


Action = Assign | Withdraw | Unplaceable


def replica_names(spec: ModelSpec) -> list[str]:
    return [f"r{index}" for index in range(spec.replicas)]


def plan(specs: list[ModelSpec], hosts: list[Host], held: dict[str, list[Assignment]]) -> list[Action]:
    """What brings the farm nearer to `specs`.

    `held` maps a host id, living or not, to its assignments. A host that no longer beats loses what it holds; an
    assignment whose model has no spec at all stays, because absence never means unload.
    """
    wanted = {(spec.name, replica): spec for spec in specs if not spec.unload for replica in replica_names(spec)}
    known = {spec.name for spec in specs}
    living = {host.id for host in hosts}
    actions: list[Action] = []
    placed: set[tuple[str, str]] = set()
    free = {host.id: list(host.devices) for host in hosts}
    crowd: Counter[str] = Counter()
    for host_id, assignments in held.items():
        for assignment in assignments:
            place = (assignment.spec.name, assignment.replica)
            spec = wanted.get(place)
            obsolete = assignment.spec.name in known and (spec is None or spec.revision != assignment.spec.revision)
            if host_id not in living or obsolete:
                actions.append(Withdraw(host_id, *place))
            if host_id not in living:
                continue
            placed.add(place)  # also what is being withdrawn: its successor waits until the ranks have ended
            crowd[host_id] += 1
            free[host_id] = [device for device in free[host_id] if device not in assignment.devices]
    for (model, replica), spec in wanted.items():
        if (model, replica) in placed:
            continue
        actions.append(_place(spec, replica, hosts, free, crowd))
    return actions


def _place(
    spec: ModelSpec, replica: str, hosts: list[Host], free: dict[str, list[str]], crowd: Counter[str]
) -> Assign | Unplaceable:
    """Choose the host with the fewest replicas among those that have the devices."""
    for host in sorted(hosts, key=lambda host: (crowd[host.id], host.id)):
        devices = choose_devices(spec, host, free[host.id])
        if devices is not None:
            crowd[host.id] += 1
            free[host.id] = [device for device in free[host.id] if device not in devices]
            assignment = Assignment(spec=spec, replica=replica, ranks=list(range(spec.tp)), devices=devices)
            return Assign(host.id, assignment)
    asked = ", ".join(spec.devices) or f"{spec.tp} devices of one kind"
    there = "; ".join(f"{host.id} has {', '.join(free[host.id]) or 'cpu only'}" for host in hosts) or "no host is alive"
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
