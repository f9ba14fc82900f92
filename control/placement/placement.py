"""Where ranks go: the rooms that hosts have, and the devices that a replica gets there. Data in, data out.

control/placement/rollout.py decides which replicas there shall be, and asks here for a place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from control.messages import Assignment, ModelSpec
from control.placement.need import ModelNeed
from control.sizes import in_words


@dataclass(frozen=True, slots=True)
class Host:
    """A host whose agent beats. `devices` are its accelerators; every host can run CPU ranks. A `drained` one gets
    nothing new, and what it has moves away."""

    id: str
    devices: tuple[str, ...] = ()
    drained: bool = False
    memory: int | None = None
    """Bytes that CPU ranks may have together; None where it does not tell, as one of an older version."""
    dedicated: bool = False
    """True if that memory is for ranks alone. Otherwise it is all that the machine has, for other programs too."""


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
    """The living hosts don't have the devices; `why` names what is asked for and what there is. `waits`: others give
    back the memory that it needs."""

    model: str
    replica: str
    why: str
    waits: bool = False


Action = Assign | Withdraw | Unplaceable


Parts = dict[str, Assignment]
"""The ranks of one replica that living hosts hold, by host id."""


Needs = Mapping[str, ModelNeed]
"""By model, of the revisions that are known."""


Wanted = Mapping[str, int]
"""How many replicas are to run now, by model on demand."""


def wanted_of(spec: ModelSpec, wanted: Wanted) -> int:
    """How many replicas of a model are to run now; one whose demand is not known yet has its least number."""
    return wanted.get(spec.name, spec.least_replicas) if spec.on_demand else spec.replicas


def bytes_of(assignment: Assignment, needs: Needs) -> int:
    """What the CPU ranks of an assignment take of their host's memory; 0 where that is not known."""
    by_rank = dict(zip(assignment.ranks, assignment.memory, strict=False))
    need = needs.get(assignment.spec.name)
    if not by_rank and need is not None and need.revision == assignment.spec.revision:
        sizes = need.bytes_with(assignment.kv_tokens or assignment.spec.kv_tokens or need.least_tokens)
        by_rank = {rank: sizes[rank] for rank in assignment.ranks if rank < len(sizes)}
    parts = zip(assignment.ranks, assignment.devices, strict=True)
    return sum(by_rank.get(rank, 0) for rank, device in parts if device == "cpu")


class Room:
    """The capacity that is left while a plan is made: `free` accelerators, `left` bytes and a count of replicas, by
    host id. A host that tells no memory has no entry in `left`, and is never full."""

    def __init__(self, hosts: Iterable[Host], needs: Needs | None = None) -> None:
        self.needs: Needs = needs or {}
        self.hosts = [host for host in hosts if not host.drained]
        self.free = {host.id: list(host.devices) for host in self.hosts}
        self.left = {host.id: host.memory for host in self.hosts if host.memory is not None}
        self.shared = {host.id for host in self.hosts if not host.dedicated}
        """Hosts of which a half of what is left stays free."""
        self.crowd: Counter[str] = Counter()
        self.pending: Counter[str] = Counter()
        """By model, the bytes that its replicas without a place need at least. No share of KV memory takes them."""

    def take(self, host_id: str, assignment: Assignment) -> None:
        """One more replica, or a part of one, is on the host."""
        self.crowd[host_id] += 1
        if host_id in self.free:
            self.free[host_id] = [device for device in self.free[host_id] if device not in assignment.devices]
        if host_id in self.left:
            self.left[host_id] -= bytes_of(assignment, self.needs)

    def without(self, parts: Parts) -> Room:
        """The capacity without the replica of these `parts`."""
        room = Room(self.hosts, self.needs)
        room.pending = self.pending.copy()
        room.crowd = self.crowd - Counter(parts.keys())
        for host in self.hosts:
            held = parts[host.id].devices if host.id in parts else []
            room.free[host.id] = [one for one in host.devices if one in self.free[host.id] or one in held]
            if host.id in self.left:
                given_back = bytes_of(parts[host.id], self.needs) if host.id in parts else 0
                room.left[host.id] = self.left[host.id] + given_back
        return room

    def holds(self, host_id: str, size: int) -> bool:
        """True if so many bytes of the host's memory are left."""
        return size <= 0 or size <= self.left.get(host_id, size)

    def share(self, host_id: str, each: int, least: int) -> int:
        """The KV tokens that a replica may have on a host of which it takes `least` bytes without any, and `each` for
        one: what is left beside all that is still to be placed, or a half of it where other programs have the memory
        too."""
        left = self.left[host_id] - self.pending.total() - least
        return left // (each * (2 if host_id in self.shared else 1))

    def await_places(self, specs: Iterable[ModelSpec], replicas: Mapping[str, int], wanted: Wanted) -> None:
        """Keep memory for what is still to be placed; `replicas` counts those that each model has. Models that sleep
        get a half of what is left at most: they may never be awake together."""
        asleep = Counter[str]()
        for spec in specs:
            need, missing = self.need_of(spec), wanted_of(spec, wanted) - replicas.get(spec.name, 0)
            if need is None or spec.unload:
                continue
            size = sum(need.bytes_with(spec.kv_tokens or need.least_tokens))
            if missing > 0:
                self.pending[spec.name] = missing * size
            elif spec.on_demand and not replicas.get(spec.name, 0):
                asleep[spec.name] = size
        left = (sum(self.left.values()) - self.pending.total()) // 2
        for name, size in sorted(asleep.items(), key=lambda one: (one[1], one[0])):
            left -= size
            if left < 0:
                return
            self.pending[name] = size

    def need_of(self, spec: ModelSpec) -> ModelNeed | None:
        """None where it is not known at this revision."""
        need = self.needs.get(spec.name)
        return need if need is not None and need.revision == spec.revision and len(need.ranks) == spec.tp else None

    def emptiest(self) -> list[Host]:
        """Those with the fewest replicas first."""
        return sorted(self.hosts, key=lambda host: (self.crowd[host.id], host.id))

    def for_parts(self, parts: Parts) -> list[Host]:
        """Hosts that have a part of the replica already, then those with the most free devices, then the emptiest."""
        return sorted(self.emptiest(), key=lambda host: (host.id not in parts, -len(self.free[host.id])))


def place(spec: ModelSpec, replica: str, parts: Parts, room: Room) -> list[Action]:
    """Give the ranks that nobody holds to one host if one has the devices and the memory, else to several, and take
    them from `room`.

    Where no host has them the answer is one Unplaceable.
    """
    there = {rank for part in parts.values() for rank in part.ranks}
    missing = [rank for rank in range(spec.tp) if rank not in there]
    if not missing:
        return []
    sizes = least_sizes(spec, parts, room)
    chosen = None if parts or spec.spread else _one_host(spec, room, sizes)
    chosen = chosen or _several_hosts(spec, missing, parts, room, sizes)
    if chosen is None:
        return [_unplaceable(spec, replica, room, sizes)]
    kv_tokens, sizes = _with_share(spec, chosen, parts, room, sizes)
    actions: list[Action] = []
    for host_id, rank_devices in chosen.items():
        part = parts.get(host_id)
        devices = rank_devices | (dict(zip(part.ranks, part.devices, strict=True)) if part else {})
        ranks = sorted(devices)
        assignment = Assignment(
            spec=spec,
            replica=replica,
            ranks=ranks,
            devices=[devices[rank] for rank in ranks],
            memory=[sizes[rank] if devices[rank] == "cpu" else 0 for rank in ranks] if sizes else [],
            kv_tokens=kv_tokens,
            kv_target=next((one.kv_target for one in parts.values()), None),
        )
        if part is not None and host_id in room.left:
            room.left[host_id] += bytes_of(part, room.needs)
        room.take(host_id, assignment)
        actions.append(Assign(host_id, assignment))
    return actions


def with_memory(parts: Parts, room: Room) -> Parts:
    """Those parts of a replica that were made before its need was known, with the memory of their ranks, which is taken
    from `room`; none while it is not known. `parts` are all of the replica."""
    [spec, *_] = (part.spec for part in parts.values())
    need = room.need_of(spec)
    if need is None:
        return {}
    kv_tokens = next((part.kv_tokens for part in parts.values() if part.kv_tokens is not None), None)
    if spec.kv_tokens is None and kv_tokens is None and any("cpu" in part.devices for part in parts.values()):
        kv_tokens = _share_of(parts, need, room)
    sizes = need.bytes_with(spec.kv_tokens or kv_tokens or need.least_tokens)
    changed: Parts = {}
    for host_id, part in parts.items():
        if host_id not in room.left or part.memory:
            continue
        devices = zip(part.ranks, part.devices, strict=True)
        memory = [sizes[rank] if device == "cpu" else 0 for rank, device in devices]
        changed[host_id] = msgspec.structs.replace(part, memory=memory, kv_tokens=kv_tokens)
        room.left[host_id] += bytes_of(part, room.needs) - bytes_of(changed[host_id], room.needs)
    return changed


def _share_of(parts: Parts, need: ModelNeed, room: Room) -> int:
    """KV tokens for a replica that has its places: of what the hosts of all its ranks have left, as of a new one."""
    shares = [need.least_tokens] if sum(len(part.ranks) for part in parts.values()) < len(need.ranks) else []
    for host_id, part in parts.items():
        ranks = [need.ranks[rank] for rank, device in zip(part.ranks, part.devices, strict=True) if device == "cpu"]
        each = sum(rank.bytes_per_token for rank in ranks)
        if host_id not in room.left or not each:
            shares.append(need.least_tokens)
            continue
        least = sum(rank.least for rank in ranks) - bytes_of(part, room.needs)  # beside what it has by now
        shares.append(room.share(host_id, each, least))
    return max(need.least_tokens, min(shares))


def least_sizes(spec: ModelSpec, parts: Parts, room: Room) -> list[int]:
    """The bytes of each rank of a replica with the fewest KV tokens that it may have, or with those that its ranks have
    already; empty where its need is not known."""
    need = room.need_of(spec)
    if need is None:
        return []
    held = next((part.kv_tokens for part in parts.values()), None)
    return need.bytes_with(spec.kv_tokens or held or need.least_tokens)


def _with_share(
    spec: ModelSpec, chosen: dict[str, dict[int, str]], parts: Parts, room: Room, sizes: list[int]
) -> tuple[int | None, list[int]]:
    """The KV tokens of a replica whose specification names none, and the bytes of its ranks with them."""
    need = room.need_of(spec)
    room.pending[spec.name] = max(0, room.pending[spec.name] - sum(sizes))
    if parts:
        return next(part.kv_tokens for part in parts.values()), sizes
    if need is None or spec.kv_tokens is not None:
        return None, sizes
    shares = list[int]()
    for host_id, devices in chosen.items():
        on_cpu = [need.ranks[rank] for rank, device in devices.items() if device == "cpu"]
        each = sum(rank.bytes_per_token for rank in on_cpu)
        if host_id in room.left and each:
            shares.append(room.share(host_id, each, sum(rank.least for rank in on_cpu)))
    if not shares:
        return None, sizes
    tokens = max(need.least_tokens, min(shares))
    return tokens, need.bytes_with(tokens)


def _one_host(spec: ModelSpec, room: Room, sizes: list[int]) -> dict[str, dict[int, str]] | None:
    """All ranks with their devices on the host with the fewest replicas among those that have devices and memory."""
    for host in room.emptiest():
        devices = choose_devices(spec, host, room.free[host.id])
        if devices is None:
            continue
        needed = sum(size for size, device in zip(sizes, devices, strict=False) if device == "cpu")
        if room.holds(host.id, needed):
            return {host.id: dict(enumerate(devices))}
    return None


def _several_hosts(
    spec: ModelSpec, missing: list[int], parts: Parts, room: Room, sizes: list[int]
) -> dict[str, dict[int, str]] | None:
    """The missing ranks over as few hosts as have the devices and the memory, or as evenly as they allow where the spec
    wants that.

    Without devices named, the ranks of a group are all of one kind: accelerators if any host has them, else the CPU.
    """
    kinds = {device.partition(":")[0] for part in parts.values() for device in part.devices}
    accelerated = kinds != {"cpu"} if kinds else any(host.devices for host in room.hosts)
    hosts = [host.id for host in room.for_parts(parts) if spec.devices or bool(host.devices) == accelerated]
    free = {host_id: list(room.free[host_id]) for host_id in hosts}
    taken: Counter[str] = Counter()
    chosen: dict[str, dict[int, str]] = {host_id: {} for host_id in hosts}
    left = list(missing)
    even = -(-spec.tp // len(hosts)) if spec.spread and hosts else spec.tp
    for most in (even, spec.tp):
        for host_id in hosts:
            have = len(parts[host_id].ranks) if host_id in parts else 0
            for rank in list(left):
                device = _device(spec, rank, free[host_id], accelerated)
                size = sizes[rank] if sizes and device == "cpu" else 0
                if (
                    device is not None
                    and have + len(chosen[host_id]) < most
                    and room.holds(host_id, taken[host_id] + size)
                ):
                    chosen[host_id][rank] = device
                    taken[host_id] += size
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


def _unplaceable(spec: ModelSpec, replica: str, room: Room, sizes: list[int]) -> Unplaceable:
    if sizes and any(choose_devices(spec, host, room.free[host.id]) is not None for host in room.hosts):
        ranks = f"its {spec.tp} ranks need" if spec.tp > 1 else "it needs"
        has = [f"{host.id} has {in_words(max(0, room.left[host.id]))}" for host in room.hosts if host.id in room.left]
        why = (
            f"{ranks} {in_words(sum(sizes))} of memory; {'; '.join(has)} left. `furrow models plan` shows what fits: "
            "--quant, fewer --kv-tokens, or more hosts"
        )
        return Unplaceable(spec.name, replica, why)
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
