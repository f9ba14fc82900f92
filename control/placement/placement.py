"""The placement of ranks: the rooms that hosts have, and the devices that a replica gets there. Data in, data out.

control/placement/rollout.py decides which replicas there shall be, and asks here for a place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from control.engines import OWN, how_to_offer
from control.messages import Assignment, ModelSpec
from control.placement.need import ModelNeed, RankNeed
from control.sizes import in_words

GPU_SHARE = 0.9
"""KV memory's part of what an accelerator has left beside a model: the need there is an estimate, and memory gets
fragmented."""


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
    device_memory: Mapping[str, int] = field(default_factory=dict[str, int])
    """Bytes that the ranks on each accelerator may have together; one whose memory is not planned is absent, and has
    one rank at most."""
    engines: tuple[str, ...] = ()
    """External engines that it offers."""

    def offers(self, engine: str) -> bool:
        """True if models on that engine can run there."""
        return engine == OWN or engine in self.engines


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


ReplicaCounts = Mapping[str, int]
"""The number of replicas that are to run now, by model on demand."""


def replica_count(spec: ModelSpec, replica_counts: ReplicaCounts) -> int:
    """The number of replicas of a model that are to run now; its least number while its demand is not known."""
    return replica_counts.get(spec.name, spec.least_replicas) if spec.on_demand else spec.replicas


def current_need(spec: ModelSpec, needs: Needs) -> ModelNeed | None:
    """None where it is not known at this revision."""
    need = needs.get(spec.name)
    return need if need is not None and need.revision == spec.revision and len(need.ranks) == spec.tp else None


def bytes_of(assignment: Assignment, needs: Needs) -> int:
    """Bytes of host memory that the CPU ranks of an assignment take; 0 if that is not known."""
    by_rank = dict(zip(assignment.ranks, assignment.memory, strict=False))
    need = needs.get(assignment.spec.name)
    if not by_rank and need is not None and need.revision == assignment.spec.revision:
        sizes = need.bytes_with(assignment.kv_tokens or assignment.spec.kv_tokens or need.least_tokens)
        by_rank = {rank: sizes[rank] for rank in assignment.ranks if rank < len(sizes)}
    parts = zip(assignment.ranks, assignment.devices, strict=True)
    return sum(by_rank.get(rank, 0) for rank, device in parts if device == "cpu")


class Sizes:
    """The bytes that each rank of a replica takes with so many KV tokens, by the device that it is on."""

    def __init__(self, need: ModelNeed | None, tokens: int, shares: Sequence[int] = ()) -> None:
        """`need`: None where it is not known. `shares`: by rank, the units that it has, where they are uneven."""
        self.need, self.tokens, self.shares = need, tokens, list(shares)

    def rank(self, rank: int, device: str) -> RankNeed | None:
        """None where it is not known."""
        if self.need is None:
            return None
        if self.shares and device == "cpu":
            return self.need.with_units(self.shares[rank])
        return self.need.rank_on(rank, device)

    def of(self, rank: int, device: str) -> int | None:
        """None where it is not known."""
        need = self.rank(rank, device)
        return None if need is None else need.least + self.tokens * need.bytes_per_token

    def on_cpus(self, ranks: Mapping[int, str]) -> int:
        """Of those of these ranks that are on CPUs; 0 where it is not known."""
        return sum(self.of(rank, device) or 0 for rank, device in ranks.items() if device == "cpu")


class Room:
    """The capacity that is left while a plan is made: `free` accelerators, `memory` in bytes and a count of replicas,
    by host id. A host that tells no memory has no entry in `memory`, and is never full. `device_memory` has the bytes
    that are left on accelerators whose memory is planned, by host id and device."""

    def __init__(self, hosts: Iterable[Host], needs: Needs | None = None) -> None:
        self.needs: Needs = needs or {}
        self.hosts = [host for host in hosts if not host.drained]
        self.free = {host.id: list(host.devices) for host in self.hosts}
        self.memory = {host.id: host.memory for host in self.hosts if host.memory is not None}
        self.device_memory = {
            (host.id, device): size for host in self.hosts for device, size in host.device_memory.items()
        }
        self.shared = {host.id for host in self.hosts if not host.dedicated}
        """Hosts of which a half of what is left stays free."""
        self.crowd: Counter[str] = Counter()
        self.pending: Counter[str] = Counter()
        """By model, the bytes that its replicas without a place need at least. No share of KV memory takes them."""
        self._assignments: list[tuple[str, Assignment]] = []

    def take(self, host_id: str, assignment: Assignment) -> None:
        """One more replica, or a part of one, is on the host."""
        self._assignments.append((host_id, assignment))
        self.crowd[host_id] += 1
        if host_id in self.free:
            self.free[host_id] = [device for device in self.free[host_id] if device not in assignment.devices]
        if host_id in self.memory:
            self.memory[host_id] -= bytes_of(assignment, self.needs)
        sizes = assignment.device_memory or [0] * len(assignment.devices)
        for device, size in zip(assignment.devices, sizes, strict=True):
            if (host_id, device) in self.device_memory:  # a rank of which nothing is known may have it all
                self.device_memory[host_id, device] = max(0, self.device_memory[host_id, device] - size) if size else 0

    def without(self, parts: Parts) -> Room:
        """The capacity without the replica of these `parts`."""
        room = Room(self.hosts, self.needs)
        room.pending = self.pending.copy()
        for host_id, assignment in self._assignments:
            part = parts.get(host_id)
            if part is None or part.place != assignment.place:
                room.take(host_id, assignment)
        return room

    def replace(self, host_id: str, old: Assignment | None, assignment: Assignment) -> None:
        """As `take`, in place of what the host had of the replica."""
        if old is None:
            self.take(host_id, assignment)
            return
        other = self.without({host_id: old})
        other.take(host_id, assignment)
        self._assignments = other._assignments
        self.free = other.free
        self.memory = other.memory
        self.device_memory = other.device_memory
        self.crowd = other.crowd

    def holds(self, host_id: str, size: int) -> bool:
        """True if so many bytes of the host's memory are left."""
        return size <= 0 or size <= self.memory.get(host_id, size)

    def devices_for(self, spec: ModelSpec, host: Host, ranks: Iterable[int], sizes: Sizes) -> dict[int, str] | None:
        """A device of the host for each of these ranks, or None where it has not so many with enough memory.

        Ranks for which the specification names devices get exactly these. The others get accelerators where the host
        has any, the CPU only where it has none: a missing GPU is never replaced silently. An accelerator that nobody
        has goes before one on which other ranks leave enough memory.
        """
        chosen: dict[int, str] = {}
        for rank in ranks:
            device = self._device_for(spec, host, rank, sizes, chosen)
            if device is None:
                return None
            chosen[rank] = device
        return chosen

    def _device_for(
        self, spec: ModelSpec, host: Host, rank: int, sizes: Sizes, chosen: Mapping[int, str]
    ) -> str | None:
        if not host.devices and not spec.devices:
            return "cpu"
        named = [spec.devices[rank]] if spec.devices else [one for one in host.devices if one not in chosen.values()]
        if named == ["cpu"]:
            return "cpu"
        fitting = [device for device in named if self._holds_on(host.id, device, sizes.of(rank, device))]
        free = [device for device in fitting if device in self.free[host.id] and device not in chosen.values()]
        shared = [one for one in fitting if (host.id, one) in self.device_memory and one not in chosen.values()]
        return next(iter(free or sorted(shared, key=lambda one: -self.device_memory[host.id, one])), None)

    def _holds_on(self, host_id: str, device: str, size: int | None) -> bool:
        """True if an accelerator has so many bytes left, or nobody has it where either is not known."""
        size_left = self.device_memory.get((host_id, device))
        if size_left is None or size is None:
            return device in self.free[host_id]
        return size <= size_left

    def share(self, host_id: str, each: int, least: int) -> int:
        """The KV tokens that a replica may have on a host of which it takes `least` bytes without any, and `each` for
        one: what is left beside all that is still to be placed, or a half of it where other programs have the memory
        too."""
        spare = self.memory[host_id] - self.pending.total() - least
        return spare // (each * (2 if host_id in self.shared else 1))

    def share_on(self, host_id: str, device: str, need: RankNeed, chosen: Iterable[str]) -> int:
        """The KV tokens that a rank may have on an accelerator: most of what is left, as its need is an estimate. Where
        other models wait, and no accelerator but those `chosen` for this one is free, their part stays."""
        waiting = 0 if set(self.free[host_id]).difference(chosen) else self.pending.total()
        spare = int(GPU_SHARE * (self.device_memory[host_id, device] - need.least - waiting))
        return spare // need.bytes_per_token

    def await_places(
        self, specs: Iterable[ModelSpec], replicas: Mapping[str, int], replica_counts: ReplicaCounts
    ) -> None:
        """Keep memory for what is still to be placed; `replicas` counts those that each model has. Models that sleep
        get a half of what is left at most: they may never be awake together."""
        asleep = Counter[str]()
        for spec in specs:
            need = current_need(spec, self.needs)
            missing = replica_count(spec, replica_counts) - replicas.get(spec.name, 0)
            if need is None or spec.unload:
                continue
            size = sum(need.bytes_with(spec.kv_tokens or need.least_tokens))
            if missing > 0:
                self.pending[spec.name] = missing * size
            elif spec.on_demand and not replicas.get(spec.name, 0):
                asleep[spec.name] = size
        spare = (sum(self.memory.values()) - self.pending.total()) // 2
        for name, size in sorted(asleep.items(), key=lambda one: (one[1], one[0])):
            spare -= size
            if spare < 0:
                return
            self.pending[name] = size

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
    present = {rank for part in parts.values() for rank in part.ranks}
    missing = [rank for rank in range(spec.tp) if rank not in present]
    if not missing:
        return []
    sizes = least_sizes(spec, parts, room)
    chosen = None if parts or spec.spread else _one_host(spec, room, sizes)
    if spec.engine == OWN:  # an external engine is one process on one host
        chosen = chosen or _several_hosts(spec, missing, parts, room, sizes)
        if chosen is None and not parts:
            chosen, sizes = _unevenly(spec, room, sizes)
    if chosen is None:
        return [_unplaceable(spec, replica, room, sizes)]
    room.pending[spec.name] = max(0, room.pending[spec.name] - sum(_on_cpus(sizes, spec.tp)))
    kv_tokens = _share(spec, chosen, parts, room, sizes)
    sizes = Sizes(sizes.need, spec.kv_tokens or kv_tokens or sizes.tokens, sizes.shares)
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
            memory=_memory(sizes, devices),
            device_memory=_device_memory(sizes, devices, room, host_id),
            kv_tokens=kv_tokens,
            shares=sizes.shares,
            kv_target=next((other.kv_target for other in parts.values()), None),
        )
        room.replace(host_id, part, assignment)
        actions.append(Assign(host_id, assignment))
    return actions


def _memory(sizes: Sizes, devices: Mapping[int, str]) -> list[int]:
    """The bytes of each rank of its host's memory, in their order; empty where they are not known."""
    if sizes.need is None:
        return []
    return [(sizes.of(rank, "cpu") or 0) if devices[rank] == "cpu" else 0 for rank in sorted(devices)]


def _device_memory(sizes: Sizes, devices: Mapping[int, str], room: Room, host_id: str) -> list[int]:
    """The bytes of each rank of its accelerator's memory; empty where none is planned."""
    if not any((host_id, device) in room.device_memory for device in devices.values()):
        return []
    return [
        (sizes.of(rank, devices[rank]) or 0) if (host_id, devices[rank]) in room.device_memory else 0
        for rank in sorted(devices)
    ]


def _on_cpus(sizes: Sizes, tp: int) -> list[int]:
    """The bytes of all ranks if they were on CPUs; empty where they are not known."""
    return [] if sizes.need is None else [sizes.of(rank, "cpu") or 0 for rank in range(tp)]


def with_memory(parts: Parts, room: Room) -> Parts:
    """Those parts of a replica that were made before its need was known, with the memory of their ranks, which is taken
    from `room`; none while it is not known. `parts` are all of the replica."""
    [spec, *_] = (part.spec for part in parts.values())
    need = current_need(spec, room.needs)
    if need is None:
        return {}
    kv_tokens = next((part.kv_tokens for part in parts.values() if part.kv_tokens is not None), None)
    if spec.kv_tokens is None and kv_tokens is None and any("cpu" in part.devices for part in parts.values()):
        kv_tokens = _share_of(parts, need, room)
    sizes = Sizes(need, spec.kv_tokens or kv_tokens or need.least_tokens)
    changed: Parts = {}
    for host_id, part in parts.items():
        if host_id not in room.memory or part.memory:
            continue
        devices = dict(zip(part.ranks, part.devices, strict=True))
        is_counted = spec.kv_tokens is not None or kv_tokens is not None
        changed[host_id] = msgspec.structs.replace(
            part,
            memory=_memory(sizes, devices),
            device_memory=_device_memory(sizes, devices, room, host_id) if is_counted else [],
            kv_tokens=kv_tokens,
        )
        room.replace(host_id, part, changed[host_id])
    return changed


def _share_of(parts: Parts, need: ModelNeed, room: Room) -> int:
    """KV tokens for a replica that has its places: of what the hosts of all its ranks have left, as of a new one."""
    shares = [need.least_tokens] if sum(len(part.ranks) for part in parts.values()) < len(need.ranks) else []
    for host_id, part in parts.items():
        ranks = [need.ranks[rank] for rank, device in zip(part.ranks, part.devices, strict=True) if device == "cpu"]
        each = sum(rank.bytes_per_token for rank in ranks)
        if host_id not in room.memory or not each:
            shares.append(need.least_tokens)
            continue
        least = sum(rank.least for rank in ranks) - bytes_of(part, room.needs)  # beside what it has by now
        shares.append(room.share(host_id, each, least))
    return max(need.least_tokens, min(shares))


def least_sizes(spec: ModelSpec, parts: Parts, room: Room) -> Sizes:
    """Of each rank of a replica with the fewest KV tokens that it may have, or with those that its ranks have
    already."""
    need = current_need(spec, room.needs)
    kv_tokens = next((part.kv_tokens for part in parts.values()), None)
    shares = next((part.shares for part in parts.values()), [])
    return Sizes(need, 0 if need is None else spec.kv_tokens or kv_tokens or need.least_tokens, shares)


def _share(spec: ModelSpec, chosen: dict[str, dict[int, str]], parts: Parts, room: Room, sizes: Sizes) -> int | None:
    """The KV tokens of a replica whose specification names none; None where its ranks are to find out."""
    need = current_need(spec, room.needs)
    if parts:
        return next(part.kv_tokens for part in parts.values())
    if need is None or spec.kv_tokens is not None:
        return None
    shares = list[int]()
    for host_id, devices in chosen.items():
        cpu_ranks = [sizes.rank(rank, device) for rank, device in devices.items() if device == "cpu"]
        on_cpu = [rank for rank in cpu_ranks if rank is not None]
        each = sum(rank.bytes_per_token for rank in on_cpu)
        if host_id in room.memory and each:
            shares.append(room.share(host_id, each, sum(rank.least for rank in on_cpu)))
        for rank, device in devices.items():
            rank_need = need.rank_on(rank, device)
            if (host_id, device) in room.device_memory and rank_need is not None and rank_need.bytes_per_token:
                shares.append(room.share_on(host_id, device, rank_need, devices.values()))
    return max(need.least_tokens, min(shares)) if shares else None


def _one_host(spec: ModelSpec, room: Room, sizes: Sizes) -> dict[str, dict[int, str]] | None:
    """All ranks with their devices on the host with the fewest replicas among those that have devices and memory."""
    for host in room.emptiest():
        devices = room.devices_for(spec, host, range(spec.tp), sizes) if host.offers(spec.engine) else None
        if devices is not None and room.holds(host.id, sizes.on_cpus(devices)):
            return {host.id: devices}
    return None


def _several_hosts(
    spec: ModelSpec, missing: list[int], parts: Parts, room: Room, sizes: Sizes
) -> dict[str, dict[int, str]] | None:
    """The missing ranks over as few hosts as have the devices and the memory, or as evenly as they allow where the spec
    wants that.

    Without devices named, the ranks of a group are all of one kind: accelerators if any host has them, else the CPU.
    """
    kinds = {device.partition(":")[0] for part in parts.values() for device in part.devices}
    accelerated = kinds != {"cpu"} if kinds else any(host.devices for host in room.hosts)
    hosts = [host for host in room.for_parts(parts) if spec.devices or bool(host.devices) == accelerated]
    chosen: dict[str, dict[int, str]] = {host.id: {} for host in hosts}
    unplaced = list(missing)
    even = -(-spec.tp // len(hosts)) if spec.spread and hosts else spec.tp
    for most in (even, spec.tp):
        for host in hosts:
            have = len(parts[host.id].ranks) if host.id in parts else 0
            for rank in list(unplaced):
                devices = room.devices_for(spec, host, [*chosen[host.id], rank], sizes)
                if (
                    devices is not None
                    and have + len(chosen[host.id]) < most
                    and room.holds(host.id, sizes.on_cpus(devices))
                ):
                    chosen[host.id] = devices
                    unplaced.remove(rank)
    return None if unplaced else {host_id: rank_devices for host_id, rank_devices in chosen.items() if rank_devices}


def _unevenly(spec: ModelSpec, room: Room, sizes: Sizes) -> tuple[dict[str, dict[int, str]] | None, Sizes]:
    """A rank on each of as many hosts' CPUs, with the units that it has memory for, and what they take; None where that
    is not enough for all units, or where ranks have even shares alone."""
    need = sizes.need
    if need is None or not need.unit_ranks or spec.tp < 2 or any(device != "cpu" for device in spec.devices):
        return None, sizes

    def bytes_with(units: int) -> int:
        return Sizes(need, sizes.tokens, [units]).of(0, "cpu") or 0

    room_for = {
        host.id: max(
            (own for own in range(1, len(need.unit_ranks) + 1) if room.holds(host.id, bytes_with(own))), default=0
        )
        for host in room.hosts
        if host.id in room.memory and not host.devices
    }
    hosts = sorted((host for host, own in room_for.items() if own), key=lambda host: (-room_for[host], host))[: spec.tp]
    shares = {host: room_for[host] for host in hosts}
    if len(hosts) < spec.tp or sum(shares.values()) < need.units:
        return None, sizes
    while sum(shares.values()) > need.units:  # the one that has least left gives a unit up
        several = [host for host in hosts if shares[host] > 1]
        shares[min(several, key=lambda host: room.memory[host] - bytes_with(shares[host]))] -= 1
    chosen = {host: {rank: "cpu"} for rank, host in enumerate(hosts)}
    return chosen, Sizes(need, sizes.tokens, list(shares.values()))


def _unplaceable(spec: ModelSpec, replica: str, room: Room, sizes: Sizes) -> Unplaceable:
    if not any(host.offers(spec.engine) for host in room.hosts) and spec.engine != OWN:
        why = f"no living host offers the engine {spec.engine}: {how_to_offer(spec.engine)}"
        return Unplaceable(spec.name, replica, why)
    ranks = f"its {spec.tp} ranks need" if spec.tp > 1 else "it needs"
    remedy = "`furrow models plan` shows what fits: --quant, fewer --kv-tokens, or more hosts"
    if on_cpus := _on_cpus(sizes, spec.tp):
        on_gpus = [_left_on(spec, host, room, sizes) for host in room.hosts]
        if there := [text for text in on_gpus if text]:
            largest = max(sizes.of(rank, "cuda") or 0 for rank in range(spec.tp))
            each = " each" if spec.tp > 1 else ""
            why = f"{ranks} {in_words(largest)} of a GPU's memory{each}; {'; '.join(there)} left. {remedy}"
            return Unplaceable(spec.name, replica, why)
        if any(choose_devices(spec, host, room.free[host.id]) is not None for host in room.hosts):
            has = [
                f"{host.id} has {in_words(max(0, room.memory[host.id]))}"
                for host in room.hosts
                if host.id in room.memory
            ]
            why = f"{ranks} {in_words(sum(on_cpus))} of memory; {'; '.join(has)} left. {remedy}"
            return Unplaceable(spec.name, replica, why)
    needed = ", ".join(spec.devices) or f"{spec.tp} devices of one kind"
    has = [f"{host.id} has {', '.join(room.free[host.id]) or 'cpu only'}" for host in room.hosts]
    there = "; ".join(has) or "no host is alive"
    return Unplaceable(
        spec.name, replica, f"asked for {needed}; {there}. Start a worker that has them, or change --devices"
    )


def _left_on(spec: ModelSpec, host: Host, room: Room, sizes: Sizes) -> str:
    """The free memory of a host's accelerators on which ranks might be; empty where it is not known, or where the
    number of devices is too small."""
    names = [
        device for device in host.devices if (host.id, device) in room.device_memory and sizes.of(0, device) is not None
    ]
    names = [device for device in names if not spec.devices or device in spec.devices]
    if len(names) < len(set(spec.devices) - {"cpu"} if spec.devices else range(spec.tp)):
        return ""
    return (
        f"{host.id} has {', '.join(f'{in_words(room.device_memory[host.id, one])} on {one}' for one in names)}"
        if names
        else ""
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
