"""The replicas that should move to another host, so that what is unplaced finds room, or memory is used more evenly.
Data in, data out: `furrow models rebalance` makes one move after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from control.messages import Assignment, ModelSpec, Place
from control.placement.placement import (
    Action,
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
from control.placement.rollout import carried_out, free_names, is_giving_back, plan

AssignmentsByHost = dict[str, list[Assignment]]
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


@dataclass(frozen=True, slots=True)
class Farm:
    """The state of a farm on which moves depend."""

    specs: list[ModelSpec]
    hosts: list[Host]
    by_host: AssignmentsByHost
    needs: Needs
    replica_counts: ReplicaCounts
    """The number of replicas of each model on demand that are to run now."""

    def moves(self) -> list[Move]:
        """All that should be moved, in this order, each after the former one has ended."""
        moves: list[Move] = []
        state = self.settled()
        while len(moves) < MOST_MOVES and (move := state.next_move()) is not None:
            moves.append(move)
            state = state.after(move).without_old(move).settled()
        return moves

    def next_move(self) -> Move | None:
        """The next move of a farm where everything that has room is placed; None where none helps."""
        possible = list(self._possible())
        before = self.unplaced()
        if before:
            best: tuple[int, int, Move] | None = None
            for move in possible:
                rest = self.after(move).without_old(move).settled().unplaced()
                if len(rest) < len(before) and (best is None or (len(rest), sum(move.successor.memory)) < best[:2]):
                    names = ", ".join(sorted({name for name, _ in before - rest}))
                    why = f"makes room for {names}" if names else "makes room"
                    best = len(rest), sum(move.successor.memory), msgspec.structs.replace(move, why=why)
            return None if best is None else best[2]
        shares = self._shares()
        gains = [(self._gain(move, shares), move) for move in possible]
        gain, move = max(gains, key=lambda one: one[0], default=(0.0, None))
        return move if gain >= LEAST_GAIN else None

    @property
    def is_settled(self) -> bool:
        """True if no replica leaves or gives memory back, and the planner has nothing to do."""
        is_leaving = any(assignment.withdrawn for own in self.by_host.values() for assignment in own)
        if is_leaving or is_giving_back(self.by_host):
            return False
        return all(isinstance(one, Unplaceable) for one in self._actions())

    def after(self, move: Move) -> Farm:
        """The farm right after a move has begun: the replica leaves, and its successor starts."""
        actions = [Withdraw(move.source, move.model, move.replica), Assign(move.target, move.successor)]
        return replace(self, by_host=carried_out(self.by_host, actions))

    def without_old(self, move: Move) -> Farm:
        """The farm once the replica has left."""
        by_host = dict(self.by_host)
        by_host[move.source] = [one for one in by_host[move.source] if not is_moved(one, move)]
        return replace(self, by_host=by_host)

    def unplaced(self) -> set[Place]:
        """The replicas for which no host has room."""
        return {(one.model, one.replica) for one in self._actions() if isinstance(one, Unplaceable)}

    def settled(self) -> Farm:
        """The farm once the planner finds nothing more to do, where every replica serves and ends as it should."""
        state = self
        for _ in range(_MOST_TURNS):
            actions = state._actions()
            by_host = carried_out(state.by_host, actions)
            leaving = any(assignment.withdrawn for own in by_host.values() for assignment in own)
            staying = {
                host: [assignment for assignment in own if not assignment.withdrawn] for host, own in by_host.items()
            }
            state = replace(state, by_host=staying)
            if not leaving and not any(isinstance(action, Assign) for action in actions):
                break
        return state

    def _actions(self) -> list[Action]:
        """The planner's actions if every replica serves that does not leave."""
        serving = {assignment.place for own in self.by_host.values() for assignment in own if not assignment.withdrawn}
        return plan(self.specs, self.hosts, self.by_host, serving, needs=self.needs, replica_counts=self.replica_counts)

    def _possible(self) -> Iterator[Move]:
        """Every replica that one host has on its CPUs and whose memory is known, to every host that has room for it
        now."""
        current = {spec.name: spec for spec in self.specs if not spec.unload}
        assignments = [assignment for own in self.by_host.values() for assignment in own]
        names = {
            name: {assignment.replica for assignment in assignments if assignment.spec.name == name} for name in current
        }
        planned = [host for host in self.hosts if host.memory is not None and not host.drained]
        for source in planned:
            for one in self.by_host.get(source.id, ()):
                spec = current.get(one.spec.name)
                is_whole = len(one.ranks) == one.spec.tp and all(device == "cpu" for device in one.devices)
                if spec is None or one.withdrawn or not one.memory or not is_whole:
                    continue
                if one.spec.revision != spec.revision:
                    continue
                for target in planned:
                    if target.id == source.id or target.devices:
                        continue
                    room = Room([target], self.needs)
                    for assignment in self.by_host.get(target.id, ()):
                        room.take(target.id, assignment)
                    name = next(iter(free_names(names[spec.name])))
                    [action] = place(msgspec.structs.replace(spec, spread=False), name, {}, room)
                    if isinstance(action, Assign):
                        successor = msgspec.structs.replace(action.assignment, spec=spec)
                        yield Move(
                            model=spec.name,
                            replica=one.replica,
                            source=source.id,
                            target=target.id,
                            successor=_as_needed(successor, one, self.needs),
                            why="spreads memory more evenly",
                        )

    def _shares(self) -> dict[str, float]:
        """The part of each host's memory that its replicas need at least."""
        return {
            host.id: sum(_least(one, self.needs) for one in self.by_host.get(host.id, ())) / max(1, host.memory)
            for host in self.hosts
            if host.memory is not None
        }

    def _gain(self, move: Move, shares: dict[str, float]) -> float:
        """By how much less of its memory the fuller of the two hosts uses after a move."""
        memory = {host.id: max(1, host.memory or 0) for host in self.hosts}
        [moved] = [one for one in self.by_host[move.source] if is_moved(one, move)]
        size = _least(moved, self.needs)
        source = shares[move.source]
        target = shares[move.target]
        changed = max(source - size / memory[move.source], target + size / memory[move.target])
        return max(source, target) - changed


def is_moved(one: Assignment, move: Move) -> bool:
    """True of the assignment whose replica moves."""
    return one.place == (move.model, move.replica)


def _as_needed(successor: Assignment, old: Assignment, needs: Needs) -> Assignment:
    """A share of KV memory that is no larger than the one that the replica had: the rest is for what is unplaced."""
    need = needs.get(successor.spec.name)
    if need is None or old.kv_tokens is None or successor.kv_tokens is None:
        return successor
    tokens = max(need.least_tokens, min(old.kv_tokens, successor.kv_tokens))
    return msgspec.structs.replace(successor, kv_tokens=tokens, memory=need.bytes_with(tokens))


def _least(one: Assignment, needs: Needs) -> int:
    """The bytes of an assignment with the fewest KV tokens that it may have: shares of what is left say nothing."""
    need = needs.get(one.spec.name)
    if need is None or one.spec.kv_tokens is not None or len(need.ranks) < one.spec.tp:
        return bytes_of(one, needs)
    sizes = Sizes(need, need.least_tokens, one.shares)
    return sizes.on_cpus(dict(zip(one.ranks, one.devices, strict=True)))
