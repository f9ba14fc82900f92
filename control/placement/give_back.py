"""KV memory that replicas give back while they serve, so that a later model has a place. Data in, data out.

A replica whose specification names no KV tokens was given a share at its load. The planner asks it to do with less
(`Assignment.kv_target`). Its leader lowers its limit as its requests let it, and tells so in its heartbeat. Only then
is the share written smaller, and what is free assigned, so a byte has one owner. No request ends, and no memory that
was given is taken back. Ranks drop nothing by themselves, because the leader alone knows what nobody needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from control.messages import Assignment, ModelSpec, Place
from control.placement.placement import Assign, Needs, Parts, Room, Sizes, bytes_of, current_need, least_sizes

AssignmentsByHost = Mapping[str, Sequence[Assignment]]
"""Assignments by host id."""


class KvUse(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of KV memory that a replica's running sequences have, and the most that its leader lets them have."""

    used: int
    limit: int


Uses = Mapping[Place, KvUse]
"""By model and replica, of those that serve."""


def parts_of_replicas(by_host: AssignmentsByHost) -> dict[Place, Parts]:
    """The assignments by replica."""
    replicas: dict[Place, Parts] = {}
    for host_id, assignments in by_host.items():
        for one in assignments:
            replicas.setdefault(one.place, {})[host_id] = one
    return replicas


def lenders(by_host: AssignmentsByHost, needs: Needs) -> dict[Place, Parts]:
    """The replicas that may be asked to give KV memory back, or were: on CPUs, with a share that was chosen for them
    and is more than one whole context."""
    replicas = parts_of_replicas(by_host)
    return {place: parts for place, parts in replicas.items() if all(_may_lend(part, needs) for part in parts.values())}


def _may_lend(one: Assignment, needs: Needs) -> bool:
    need = current_need(one.spec, needs)
    chosen = one.spec.kv_tokens is None and one.kv_tokens is not None and not one.withdrawn
    sized = bool(one.memory) and all(device == "cpu" for device in one.devices)
    if one.shares and (need is None or max(one.shares) > len(need.unit_ranks)):
        return False
    return chosen and sized and need is not None and (one.kv_tokens or 0) > need.context_tokens


def given_back(by_host: AssignmentsByHost, needs: Needs, uses: Uses) -> list[Assign]:
    """Smaller shares of the replicas that do with what they were asked to do with."""
    actions: list[Assign] = []
    for place, parts in lenders(by_host, needs).items():
        for host_id, part in parts.items():
            use = uses.get(place)
            if part.kv_target is not None and use is not None and use.limit <= part.kv_target:
                actions.append(Assign(host_id, _with_tokens(part, part.kv_target, needs)))
    return actions


def _with_tokens(part: Assignment, tokens: int, needs: Needs) -> Assignment:
    need = current_need(part.spec, needs)
    assert need is not None
    sizes = Sizes(need, tokens, part.shares)
    memory = [sizes.of(rank, "cpu") or 0 for rank in part.ranks]
    return msgspec.structs.replace(part, kv_tokens=tokens, kv_target=None, memory=memory)


def with_lent(by_host: AssignmentsByHost, needs: Needs, uses: Uses) -> dict[str, list[Assignment]]:
    """The assignments if all replicas gave back what they can."""
    changed = {host_id: list(assignments) for host_id, assignments in by_host.items()}
    for place, parts in lenders(by_host, needs).items():
        tokens = _least_tokens(place, parts, needs, uses)
        for host_id, part in parts.items():
            smaller = _with_tokens(part, tokens, needs)
            changed[host_id] = [smaller if one is part else one for one in changed[host_id]]
    return changed


def _least_tokens(place: Place, parts: Parts, needs: Needs, uses: Uses) -> int:
    """The fewest KV tokens that a replica can do with now: one whole context at least, and what it uses; those that it
    was asked to do with, where it was. All that it has where its use is not known."""
    part = next(iter(parts.values()))
    need = current_need(part.spec, needs)
    assert need is not None and part.kv_tokens is not None
    if part.kv_target is not None:
        return part.kv_target
    use = uses.get(place)
    return part.kv_tokens if use is None else min(part.kv_tokens, max(need.context_tokens, use.used))


class Asking:
    """Asks replicas for KV memory, for models without a place in the order in which they came."""

    def __init__(self, by_host: AssignmentsByHost, room: Room, uses: Uses) -> None:
        """`room`: beside all that hosts hold."""
        self._room = room
        self._uses = uses
        self._lenders = lenders(by_host, room.needs)
        self._targets: dict[Place, int] = {}
        self._promised = Counter[str]()
        """By host, bytes that are given back for others."""

    def ask(self, spec: ModelSpec, parts: Parts) -> bool:
        """True if replicas give back, or are asked to, what the missing ranks of a replica need on one host."""
        need = current_need(spec, self._room.needs)
        present = {rank for part in parts.values() for rank in part.ranks}
        missing = [rank for rank in range(spec.tp) if rank not in present]
        if need is None:
            return False
        least = least_sizes(spec, parts, self._room)
        several = [least] if parts or spec.kv_tokens is not None else [Sizes(need, need.context_tokens), least]
        for sizes in several:
            for host in self._room.hosts:
                devices = self._room.devices_for(spec, host, missing, sizes)
                if host.id not in self._room.memory or devices is None or set(devices.values()) != {"cpu"}:
                    continue
                if self._lend(host.id, sizes.on_cpus(devices)):
                    return True
        return False

    @property
    def lenders(self) -> list[str]:
        """The replicas that give back, as `model:replica`."""
        giving = [
            place
            for place, parts in self._lenders.items()
            if place in self._targets or any(other.kv_target is not None for other in parts.values())
        ]
        return [f"{model}:{replica}" for model, replica in sorted(giving)]

    def _lend(self, host_id: str, size: int) -> bool:
        """Ask the replicas of a host for so much of its memory, those that can give most first."""
        short = size - self._room.memory[host_id] - self._pending(host_id) + self._promised[host_id]
        spare = sorted(self._spare(host_id), key=lambda one: (-one[1], one[0]))
        if short > sum(bytes_there for _, bytes_there, _ in spare):
            return False
        for place, bytes_there, bytes_per_token in spare:
            if short <= 0:
                break
            lent = min(short, bytes_there)
            self._targets[place] = self._tokens(place) - -(-lent // bytes_per_token)
            short -= lent
        self._promised[host_id] += size
        return True

    def _tokens(self, place: Place) -> int:
        part = next(iter(self._lenders[place].values()))
        assert part.kv_tokens is not None
        return self._targets.get(place, part.kv_tokens)

    def _pending(self, host_id: str) -> int:
        """Bytes that are being given back, or whose return was requested just now."""
        pending = 0
        for place, parts in self._lenders.items():
            part = parts.get(host_id)
            tokens = self._targets.get(place, part.kv_target if part is not None else None)
            if part is not None and tokens is not None:
                smaller = _with_tokens(part, tokens, self._room.needs)
                pending += bytes_of(part, self._room.needs) - bytes_of(smaller, self._room.needs)
        return pending

    def _spare(self, host_id: str) -> Iterator[tuple[Place, int, int]]:
        """The replicas of a host that can be asked, with the bytes that they can give back there and those of one
        token."""
        for place, parts in self._lenders.items():
            part = parts.get(host_id)
            if part is None or any(other.kv_target is not None for other in parts.values()):
                continue
            need = current_need(part.spec, self._room.needs)
            assert need is not None
            sizes = Sizes(need, 0, part.shares)
            sizes_of_ranks = [sizes.rank(rank, "cpu") for rank in part.ranks]
            each = sum(rank.bytes_per_token for rank in sizes_of_ranks if rank is not None)
            spare = self._tokens(place) - _least_tokens(place, parts, self._room.needs, self._uses)
            if each and spare > 0:
                yield place, spare * each, each

    def actions(self) -> list[Assign]:
        """The targets of the replicas that are asked."""
        return [
            Assign(host_id, msgspec.structs.replace(part, kv_target=tokens))
            for place, tokens in self._targets.items()
            for host_id, part in self._lenders[place].items()
        ]
