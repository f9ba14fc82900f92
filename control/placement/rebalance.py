"""The replicas that should move to another host, so that what is unplaced finds room, or memory is used more evenly.
Data in, data out: `furrow models rebalance` makes one move after the other."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from control.messages import Assignment, ModelSpec
from control.placement.placement import (
    Assign,
    Host,
    Needs,
    ReplicaCounts,
    Room,
    Sizes,
    Unplaceable,
    Withdraw,
    bytes_of,
    place,
)
from control.placement.rollout import Place, free_names, is_giving_back, plan

Held = dict[str, list[Assignment]]
"""Assignments by host id."""

LEAST_GAIN = 0.1
"""The fuller of two hosts has so much of its memory less after a move that only spreads more evenly."""
MOST_MOVES = 100
_MOST_TURNS = 100


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """A replica that leaves its host by a drain, and its successor, which starts on another host at the same time."""

    model: str
    replica: str
    source: str
    target: str
    successor: Assignment
    why: str


def moves(
    specs: list[ModelSpec], hosts: list[Host], held: Held, needs: Needs, replica_counts: ReplicaCounts
) -> list[Move]:
    """All that should be moved, in this order, each after the former one has ended."""
    made: list[Move] = []
    state = settled(specs, hosts, held, needs, replica_counts)
    while len(made) < MOST_MOVES and (move := next_move(specs, hosts, state, needs, replica_counts)) is not None:
        made.append(move)
        state = settled(specs, hosts, without_old(after(state, move), move), needs, replica_counts)
    return made


def next_move(
    specs: list[ModelSpec], hosts: list[Host], held: Held, needs: Needs, replica_counts: ReplicaCounts
) -> Move | None:
    """The next move of a farm where everything that has room is placed; None where none helps."""
    possible = list(_possible(specs, hosts, held, needs))
    before = unplaced(specs, hosts, held, needs, replica_counts)
    if before:
        best: tuple[int, int, Move] | None = None
        for move in possible:
            state = settled(specs, hosts, without_old(after(held, move), move), needs, replica_counts)
            rest = unplaced(specs, hosts, state, needs, replica_counts)
            if len(rest) < len(before) and (best is None or (len(rest), sum(move.successor.memory)) < best[:2]):
                names = ", ".join(sorted({name for name, _ in before - rest}))
                why = f"makes room for {names}" if names else "makes room"
                best = len(rest), sum(move.successor.memory), msgspec.structs.replace(move, why=why)
        return None if best is None else best[2]
    shares = _shares(hosts, held, needs)
    gains = [(_gain(move, hosts, held, needs, shares), move) for move in possible]
    gain, move = max(gains, key=lambda one: one[0], default=(0.0, None))
    return move if gain >= LEAST_GAIN else None


def is_settled(
    specs: list[ModelSpec], hosts: list[Host], held: Held, needs: Needs, replica_counts: ReplicaCounts
) -> bool:
    """True if no replica leaves or gives memory back, and the planner has nothing to do."""
    if any(one.withdrawn for own in held.values() for one in own) or is_giving_back(held):
        return False
    actions = plan(specs, hosts, held, _all_places(held), needs=needs, replica_counts=replica_counts)
    return all(isinstance(one, Unplaceable) for one in actions)


def after(held: Held, move: Move) -> Held:
    """The assignments right after a move has begun: the replica leaves, and its successor starts."""
    changed = {host: list(own) for host, own in held.items()}
    changed[move.source] = [
        msgspec.structs.replace(one, withdrawn=True) if is_moved(one, move) else one for one in changed[move.source]
    ]
    changed.setdefault(move.target, []).append(move.successor)
    return changed


def without_old(held: Held, move: Move) -> Held:
    """The assignments once the replica has left."""
    return {
        host: [one for one in own if not (host == move.source and is_moved(one, move))] for host, own in held.items()
    }


def unplaced(
    specs: list[ModelSpec], hosts: list[Host], held: Held, needs: Needs, replica_counts: ReplicaCounts
) -> set[Place]:
    """The replicas for which no host has room."""
    actions = plan(specs, hosts, held, _all_places(held), needs=needs, replica_counts=replica_counts)
    return {(one.model, one.replica) for one in actions if isinstance(one, Unplaceable)}


def settled(specs: list[ModelSpec], hosts: list[Host], held: Held, needs: Needs, replica_counts: ReplicaCounts) -> Held:
    """The assignments of hosts once the planner finds nothing more to do, where every replica serves and ends as it
    should."""
    state = {host: list(own) for host, own in held.items()}
    for _ in range(_MOST_TURNS):
        actions = plan(specs, hosts, state, _all_places(state), needs=needs, replica_counts=replica_counts)
        changed = False
        for action in actions:
            match action:
                case Assign(host, assignment):
                    others = [one for one in state.get(host, []) if not _same(one, assignment)]
                    state[host] = [*others, assignment]
                    changed = True
                case Withdraw(host, model, replica):
                    state[host] = [one for one in state[host] if (one.spec.name, one.replica) != (model, replica)]
                    changed = True
                case Unplaceable():
                    pass
        leaving = any(one.withdrawn for own in state.values() for one in own)
        state = {host: [one for one in own if not one.withdrawn] for host, own in state.items()}
        if not changed and not leaving:
            break
    return state


def _same(one: Assignment, other: Assignment) -> bool:
    return (one.spec.name, one.replica) == (other.spec.name, other.replica)


def is_moved(one: Assignment, move: Move) -> bool:
    """True of the assignment whose replica moves."""
    return (one.spec.name, one.replica) == (move.model, move.replica)


def _all_places(held: Held) -> set[Place]:
    return {(one.spec.name, one.replica) for own in held.values() for one in own if not one.withdrawn}


def _possible(specs: list[ModelSpec], hosts: list[Host], held: Held, needs: Needs) -> Iterator[Move]:
    """Every replica that one host has on its CPUs and whose memory is known, to every host that has room for it now."""
    current = {spec.name: spec for spec in specs if not spec.unload}
    names = {name: {one.replica for own in held.values() for one in own if one.spec.name == name} for name in current}
    planned = [host for host in hosts if host.memory is not None and not host.drained]
    for source in planned:
        for one in held.get(source.id, ()):
            spec = current.get(one.spec.name)
            is_whole = len(one.ranks) == one.spec.tp and all(device == "cpu" for device in one.devices)
            if spec is None or one.withdrawn or not one.memory or not is_whole or one.spec.revision != spec.revision:
                continue
            for target in planned:
                if target.id == source.id or target.devices:
                    continue
                room = Room([target], needs)
                for assignment in held.get(target.id, ()):
                    room.take(target.id, assignment)
                name = next(iter(free_names(names[spec.name])))
                [action] = place(msgspec.structs.replace(spec, spread=False), name, {}, room)
                if isinstance(action, Assign):
                    successor = _as_needed(msgspec.structs.replace(action.assignment, spec=spec), one, needs)
                    yield Move(
                        model=spec.name,
                        replica=one.replica,
                        source=source.id,
                        target=target.id,
                        successor=successor,
                        why="spreads memory more evenly",
                    )


def _as_needed(successor: Assignment, old: Assignment, needs: Needs) -> Assignment:
    """A share of KV memory that is no larger than the one that the replica had: the rest is for what is unplaced."""
    need = needs.get(successor.spec.name)
    if need is None or old.kv_tokens is None or successor.kv_tokens is None:
        return successor
    tokens = max(need.least_tokens, min(old.kv_tokens, successor.kv_tokens))
    return msgspec.structs.replace(successor, kv_tokens=tokens, memory=need.bytes_with(tokens))


def _shares(hosts: list[Host], held: Held, needs: Needs) -> dict[str, float]:
    """The part of each host's memory that its replicas need at least."""
    return {
        host.id: sum(_least(one, needs) for one in held.get(host.id, ())) / max(1, host.memory)
        for host in hosts
        if host.memory is not None
    }


def _least(one: Assignment, needs: Needs) -> int:
    """The bytes of an assignment with the fewest KV tokens that it may have: shares of what is left say nothing."""
    need = needs.get(one.spec.name)
    if need is None or one.spec.kv_tokens is not None or len(need.ranks) < one.spec.tp:
        return bytes_of(one, needs)
    sizes = Sizes(need, need.least_tokens, one.shares)
    return sizes.on_cpus(dict(zip(one.ranks, one.devices, strict=True)))


def _gain(move: Move, hosts: list[Host], held: Held, needs: Needs, shares: dict[str, float]) -> float:
    """By how much less of its memory the fuller of the two hosts uses after a move."""
    memory = {host.id: max(1, host.memory or 0) for host in hosts}
    [moved] = [one for one in held[move.source] if is_moved(one, move)]
    size = _least(moved, needs)
    source = shares[move.source]
    target = shares[move.target]
    changed = max(source - size / memory[move.source], target + size / memory[move.target])
    return max(source, target) - changed
