"""The replicas that a farm shall have next, as a pure function of state: desired models, hosts, and what is assigned.

It is run again and again by the agent that holds the placement lock, until desired and actual are the same. A change is
rolled out replica by replica: the new one serves before an old one is asked to go, where there are devices for both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from control.messages import Assignment, ModelSpec, Place
from control.placement.give_back import Asking, Uses, given_back, parts_of_replicas
from control.placement.placement import (
    Action,
    Assign,
    Host,
    Needs,
    Parts,
    ReplicaCounts,
    Room,
    Unplaceable,
    Withdraw,
    bytes_of,
    place,
    replica_count,
    with_memory,
)

Part = tuple[str, str, str]
"""Host, model and replica: the ranks of one replica on one host."""

Life = Literal["current", "old", "leaving"]
"""The phase of a replica: as desired; of an older revision, or on a host that is drained; asked to stop."""


@dataclass(slots=True)
class Replica:
    """One replica as living hosts hold it."""

    name: str
    spec: ModelSpec
    """The spec with which it was assigned, which may differ from the desired one."""
    parts: Parts = field(default_factory=dict)
    leaving: bool = False
    contested: bool = False
    """Two hosts hold the same rank: nothing is added until one has let go."""

    def life(self, desired: ModelSpec, drained: Set[str]) -> Life:
        if self.leaving:
            return "leaving"
        return "old" if self.spec.revision != desired.revision or drained & self.parts.keys() else "current"


def free_names(names: Collection[str]) -> Iterable[str]:
    """`r0`, `r1`, … without those that are taken. A name is free again once its replica is gone."""
    index = 0
    while True:
        if f"r{index}" not in names:
            yield f"r{index}"
        index += 1


def in_order(names: Iterable[str]) -> list[str]:
    """r2 before r10."""
    return sorted(names, key=lambda name: (len(name), name))


def is_settled(
    specs: list[ModelSpec],
    hosts: list[Host],
    by_host: dict[str, list[Assignment]],
    unattended: Set[Part] = frozenset(),
    needs: Needs | None = None,
    replica_counts: ReplicaCounts | None = None,
) -> bool:
    """True if no replica is to be removed, so that a plan doesn't need the replicas' health."""
    _, replicas = _standing(hosts, by_host, unattended)
    drained = _drained(hosts)
    if any(_too_much(_room(hosts, by_host, needs), by_host)):
        return False
    for spec in specs:
        lives = [replica.life(spec, drained) for replica in replicas.get(spec.name, {}).values()]
        if not spec.unload and ("old" in lives or lives.count("current") > replica_count(spec, replica_counts or {})):
            return False
    return True


def plan(
    specs: list[ModelSpec],
    hosts: list[Host],
    by_host: dict[str, list[Assignment]],
    serving: Set[Place] = frozenset(),
    failed: Set[Place] = frozenset(),
    unattended: Set[Part] = frozenset(),
    needs: Needs | None = None,
    replica_counts: ReplicaCounts | None = None,
    uses: Uses | None = None,
) -> list[Action]:
    """The actions that bring the farm nearer to `specs`.

    `by_host` maps a host id, living or not, to its assignments. A host that no longer beats loses what it holds, except
    for the `unattended` parts: their ranks live, and only the host's agent is away. An assignment whose model has no
    spec at all stays, because absence never means unload. A host that was thought dead and comes back with ranks that
    another one has by now loses them. `serving` and `failed` say how replicas are; they matter only where something is
    to go. `needs` has what is known of the memory of models: no host is given more CPU ranks than its memory holds.
    `replica_counts` has the replicas of models on demand, `uses` the KV memory that replicas use, which is asked for
    and taken back where a replica has no place."""
    replica_counts = replica_counts or {}
    smaller = given_back(by_host, needs or {}, uses or {})
    by_host = _with(by_host, smaller)
    actions, replicas = _standing(hosts, by_host, unattended)
    actions = [*smaller, *actions]
    room = _room(hosts, by_host, needs)
    actions += [Withdraw(host_id, *one.place, at_once=True) for host_id, one in _too_much(room, by_host, serving)]
    room.await_places(specs, {name: len(own) for name, own in replicas.items()}, replica_counts)
    actions += _sized(by_host, room, {action.host for action in actions if isinstance(action, Withdraw)})
    for spec in specs:
        mine = list(replicas.get(spec.name, {}).values())
        if spec.unload:
            actions += [action for replica in mine for action in _withdraw(replica)]
        else:
            states = [{name for model, name in places if model == spec.name} for places in (serving, failed)]
            count = replica_count(spec, replica_counts)
            actions += Rollout(spec, count, mine, room, _drained(hosts), *states).actions()
    return _asking(actions, specs, by_host, replicas, _room(hosts, carried_out(by_host, actions), needs), uses or {})


def is_giving_back(by_host: Mapping[str, Sequence[Assignment]]) -> bool:
    """True while a replica has KV memory that it was asked to give back."""
    return any(assignment.kv_target is not None for assignments in by_host.values() for assignment in assignments)


def _with(by_host: dict[str, list[Assignment]], assigned: Iterable[Assign]) -> dict[str, list[Assignment]]:
    """The assignments once these are made."""
    changed = {host_id: list(assignments) for host_id, assignments in by_host.items()}
    for action in assigned:
        place = action.assignment.place
        others = [one for one in changed.get(action.host, []) if one.place != place]
        changed[action.host] = [*others, action.assignment]
    return changed


def carried_out(by_host: dict[str, list[Assignment]], actions: Sequence[Action]) -> dict[str, list[Assignment]]:
    """The assignments once the actions are carried out; what is withdrawn leaves."""
    changed = _with(by_host, (action for action in actions if isinstance(action, Assign)))
    leaving = {(action.host, action.model, action.replica) for action in actions if isinstance(action, Withdraw)}
    return {
        host_id: [
            msgspec.structs.replace(assignment, withdrawn=True)
            if (host_id, *assignment.place) in leaving
            else assignment
            for assignment in assignments
        ]
        for host_id, assignments in changed.items()
    }


def _asking(
    actions: list[Action],
    specs: list[ModelSpec],
    by_host: dict[str, list[Assignment]],
    replicas: dict[str, dict[str, Replica]],
    room: Room,
    uses: Uses,
) -> list[Action]:
    """The actions with what is asked of others for replicas that have no place."""
    by_name = {spec.name: spec for spec in specs}
    if not any(isinstance(action, Unplaceable) for action in actions):
        return actions
    asking = Asking(carried_out(by_host, actions), room, uses)
    rest: list[Action] = []
    for action in actions:
        if isinstance(action, Unplaceable):
            replica = replicas.get(action.model, {}).get(action.replica)
            if asking.ask(by_name[action.model], replica.parts if replica is not None else {}):
                why = f"waits for KV memory that {', '.join(asking.lenders)} gives back"
                rest.append(Unplaceable(action.model, action.replica, why, waits=True))
                continue
        rest.append(action)
    return [*rest, *asking.actions()]


def _standing(
    hosts: list[Host], by_host: dict[str, list[Assignment]], unattended: Set[Part]
) -> tuple[list[Action], dict[str, dict[str, Replica]]]:
    """Withdrawals from hosts that are dead or came back too late, and the remaining replicas by model and name."""
    living = {host.id for host in hosts}
    actions: list[Action] = []
    replicas: dict[str, dict[str, Replica]] = {}
    for host_id, assignments in by_host.items():
        for one in assignments:
            if host_id not in living and (host_id, *one.place) not in unattended:
                actions.append(Withdraw(host_id, *one.place))
                continue
            mine = replicas.setdefault(one.spec.name, {})
            replica = mine.setdefault(one.replica, Replica(one.replica, one.spec))
            if any(set(one.ranks) & set(part.ranks) for part in replica.parts.values()):
                actions.append(Withdraw(host_id, *one.place, at_once=True))
                replica.contested = True
            else:
                replica.parts[host_id] = one
                replica.leaving = replica.leaving or one.withdrawn
    return actions, replicas


def _room(hosts: list[Host], by_host: dict[str, list[Assignment]], needs: Needs | None) -> Room:
    """The room that is left beside all that hosts hold."""
    room = Room(hosts, needs)
    for host_id, assignments in by_host.items():
        for assignment in assignments:
            room.take(host_id, assignment)
    return room


def _too_much(
    room: Room, by_host: dict[str, list[Assignment]], serving: Set[Place] = frozenset()
) -> Iterator[tuple[str, Assignment]]:
    """Of hosts that were given more than their memory, before a need was known, what does not serve and is to go."""
    for host_id, left in room.memory.items():
        for one in sorted(by_host.get(host_id, ()), key=lambda one: one.place, reverse=True):
            size = bytes_of(one, room.needs)
            if left < 0 and size and not one.withdrawn and one.place not in serving:
                left += size
                yield host_id, one


def _sized(by_host: dict[str, list[Assignment]], room: Room, crowded: Set[str]) -> list[Action]:
    """Assignments that were made before a need was known, with their memory, but for replicas on hosts from which
    something is to go first."""
    actions: list[Action] = []
    for all_parts in parts_of_replicas(by_host).values():
        parts = {host_id: part for host_id, part in all_parts.items() if not part.withdrawn}
        lacking = {host_id for host_id, part in parts.items() if host_id in room.memory and not part.memory}
        if lacking and not lacking & crowded:
            actions += [Assign(host_id, part) for host_id, part in with_memory(parts, room).items()]
    return actions


def _drained(hosts: list[Host]) -> set[str]:
    return {host.id for host in hosts if host.drained}


def _withdraw(replica: Replica) -> list[Action]:
    return [Withdraw(host_id, part.spec.name, replica.name) for host_id, part in replica.parts.items()]


class Rollout:
    """One model's next moves."""

    def __init__(
        self,
        spec: ModelSpec,
        count: int,
        replicas: list[Replica],
        room: Room,
        drained: Set[str],
        serving: Set[str],
        failed: Set[str],
    ) -> None:
        self._spec = spec
        self._count = count
        self._replicas = replicas
        self._room = room
        self._drained = drained
        self._serving = serving
        self._failed = failed
        self._by_life: dict[Life, list[Replica]] = {"current": [], "old": [], "leaving": []}
        for replica in sorted(replicas, key=lambda one: (len(one.name), one.name)):
            self._by_life[replica.life(spec, drained)].append(replica)

    def actions(self) -> list[Action]:
        """Complete replicas that have lost ranks, withdraw those beyond the number, add missing ones."""
        return [*self._complete(), *self._let_go(), *self._add()]

    def _complete(self) -> list[Action]:
        """Ranks of a lost host are given to others; replicas as desired learn what else the specification says now."""
        actions: list[Action] = []
        for replica in self._by_life["current"] + self._by_life["old"]:
            if replica.contested:
                continue
            spec = self._spec if replica in self._by_life["current"] else replica.spec
            placed = place(spec, replica.name, replica.parts, self._room)
            receivers = {action.host for action in placed if isinstance(action, Assign)}
            actions += placed
            actions += [
                Assign(host_id, msgspec.structs.replace(part, spec=spec))
                for host_id, part in replica.parts.items()
                if part.spec != spec and host_id not in receivers
            ]
        return actions

    def _let_go(self) -> list[Action]:
        """Replicas above the wanted number, and old replicas without which enough serve."""
        current = self._by_life["current"]
        old = self._by_life["old"]
        last_first = current[::-1]
        surplus = sorted(last_first, key=lambda one: one.name in self._serving)
        actions: list[Action] = []
        for replica in surplus[: max(0, len(current) - self._count)]:
            actions += self._go(replica, current)
        for replica in sorted(old, key=self._usefulness):
            others = [one for one in current + old if one is not replica and one.name in self._serving]
            if replica.name in self._failed or len(others) >= self._count:
                actions += self._go(replica, old)
        return actions

    def _usefulness(self, replica: Replica) -> int:
        """Those that have failed first, then those that don't serve."""
        return 0 if replica.name in self._failed else 1 + (replica.name in self._serving)

    def _go(self, replica: Replica, group: list[Replica]) -> list[Action]:
        group.remove(replica)
        self._by_life["leaving"].append(replica)
        return _withdraw(replica)

    def _add(self) -> list[Action]:
        """As many as are missing; in all at most one more than is wanted, and that only if it is allowed.

        Those that are leaving count, because they still have their memory; but where nothing else is left, one comes.
        """
        spec = self._spec
        current = self._by_life["current"]
        old = self._by_life["old"]
        missing = self._count - len(current)
        most = min(missing, self._count + spec.surge - sum(map(len, self._by_life.values())))
        if missing > 0 and not current and not old and spec.surge:
            most = max(most, 1)
        names = free_names([replica.name for replica in self._replicas])
        actions: list[Action] = []
        for _, name in zip(range(most), names, strict=False):
            actions += place(spec, name, {}, self._room)
        leaving = bool(self._by_life["leaving"])  # what it holds will be free
        if leaving:
            actions = [action for action in actions if isinstance(action, Assign)]
        placed = any(isinstance(action, Assign) for action in actions)
        if missing <= 0 or placed or not old:
            return actions
        waits = leaving or any(replica.name not in self._serving for replica in current)
        return [] if waits else self._make_room(next(iter(free_names([one.name for one in self._replicas]))))

    def _make_room(self, name: str) -> list[Action]:
        """No device is spare: an old replica goes first, and requests wait in the queue meanwhile.

        Only if its successor will have a place then; but a host that is drained is left in any case.
        """
        old = sorted(self._by_life["old"], key=self._usefulness)
        for replica in old:
            room = self._room.without(replica.parts)
            if (
                not isinstance(place(self._spec, name, {}, room)[0], Unplaceable)
                or replica.parts.keys() & self._drained
            ):
                return self._go(replica, self._by_life["old"])
        return place(self._spec, name, {}, self._room)
