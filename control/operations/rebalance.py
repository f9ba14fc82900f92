"""Moves of replicas between hosts, so that what is unplaced finds room, or memory is used more evenly."""

from __future__ import annotations

from dataclasses import dataclass

from control.errors import ModelUnavailable
from control.messages import Assignment, ModelSpec
from control.placement import farm, rebalance
from control.placement.farm_view import read_farm_view
from control.placement.need import ModelNeed
from control.placement.placement import Host
from control.placement.rebalance import Move
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas import health


@dataclass(frozen=True, slots=True)
class Farm:
    """What a move depends on. `wanted`: how many replicas of each model on demand are to run now."""

    specs: list[ModelSpec]
    hosts: list[Host]
    held: dict[str, list[Assignment]]
    needs: dict[str, ModelNeed]
    wanted: dict[str, int]

    @property
    def is_settled(self) -> bool:
        """False while a replica leaves its host, or is to be placed."""
        return rebalance.is_settled(self.specs, self.hosts, self.held, self.needs, self.wanted)


def read_farm(client: SyncRedis) -> Farm:
    """Raises RedisUnavailable."""
    view = read_farm_view(client)
    names = [spec.name for spec in view.specs if spec.on_demand]
    demands = run_every(client, [farm.demand_of(name) for name in names])
    wanted = {name: demand.replicas for name, demand in zip(names, demands, strict=True) if demand is not None}
    return Farm(view.specs, view.hosts, view.held, view.needs, wanted)


def planned_moves(state: Farm) -> list[Move]:
    """All moves, in their order."""
    return rebalance.moves(state.specs, state.hosts, state.held, state.needs, state.wanted)


def next_move(state: Farm) -> Move | None:
    """The first of them; None where nothing should be moved."""
    return rebalance.next_move(state.specs, state.hosts, state.held, state.needs, state.wanted)


def begin(client: SyncRedis, move: Move) -> None:
    """Ask the replica to drain, and assign its successor."""
    for one in farm.assignments(client, move.source):
        if rebalance.is_moved(one, move):
            farm.withdraw(client, move.source, one)
    farm.assign(client, move.target, move.successor)


def is_over(client: SyncRedis, move: Move) -> bool:
    """True once the replica has left and its successor serves. Raises ModelUnavailable where that fails."""
    replicas = {one.replica: one for one in health.overview(client, move.model).replicas}
    successor = replicas.get(move.successor.replica)
    if successor is not None and successor.state == "failed":
        raise ModelUnavailable(
            move.model, "failed", f"replica {successor.replica} on {move.target}: {successor.detail}"
        )
    left = not any(rebalance.is_moved(one, move) for one in farm.assignments(client, move.source))
    return left and successor is not None and successor.state == "loaded"
