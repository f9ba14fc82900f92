"""Moves of replicas between hosts, so that what is unplaced finds room, or memory is used more evenly."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager

from control.errors import ModelUnavailable, SettingsError
from control.placement import farm
from control.placement.farm import read_farm_view
from control.placement.rebalance import Farm, Move, is_moved
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import model_overviews

HANDED_OVER_S = 15.0
"""A turn of the agent that plans takes less."""
CLAIM_EVERY_S = 0.05


def read_farm(client: SyncRedis) -> Farm:
    """Raises RedisUnavailable."""
    view = read_farm_view(client)
    names = [spec.name for spec in view.specs if spec.on_demand]
    demands = run_every(client, [farm.demand_of(name) for name in names])
    replica_counts = {name: demand.replicas for name, demand in zip(names, demands, strict=True) if demand is not None}
    return Farm(view.specs, view.hosts, view.by_host, view.needs, replica_counts)


def begin(client: SyncRedis, move: Move, state: Farm) -> bool:
    """Ask the replica to drain, and assign its successor, while no agent plans. False, and nothing is done, where the
    farm is not in the `state` any more from which the move follows. Raises SettingsError where no agent hands planning
    over."""
    with _planning(client) as name:
        if read_farm(client) != state or not run(client, farm.claim_placement(name)):
            return False
        for one in farm.assignments(client, move.source):
            if is_moved(one, move):
                farm.withdraw(client, move.source, one)
        farm.assign(client, move.target, move.successor)
        return True


@contextmanager
def _planning(client: SyncRedis) -> Generator[str]:
    """Hold the placement lock; its holder's name. An agent hands it over between two of its turns."""
    name = f"rebalance {uuid.uuid4().hex}"
    until = time.monotonic() + HANDED_OVER_S
    while not run(client, farm.claim_placement(name)):
        if time.monotonic() > until:
            raise SettingsError(
                f"no agent let this command plan within {HANDED_OVER_S:.0f} s; `furrow doctor` tells which agent is ill"
            )
        time.sleep(CLAIM_EVERY_S)
    try:
        yield name
    finally:
        run(client, farm.release_placement(name))


def is_over(client: SyncRedis, move: Move) -> bool:
    """True once the replica has left and its successor serves. Raises ModelUnavailable where that fails."""
    replicas = {replica.replica: replica for replica in model_overviews.overview(client, move.model).replicas}
    successor = replicas.get(move.successor.replica)
    if successor is not None and successor.state == "failed":
        raise ModelUnavailable(
            move.model, "failed", f"replica {successor.replica} on {move.target}: {successor.detail}"
        )
    vacated = not any(is_moved(one, move) for one in farm.assignments(client, move.source))
    return vacated and successor is not None and successor.state == "loaded"
