"""Moves between hosts exceed no memory: while one is made; what one move can place is placed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control.placement.need import ModelNeed
from control.placement.placement import Host, Room, Unplaceable, place
from control.placement.rebalance import AssignmentsByHost, Move
from control.placement.rebalance import Farm as PlacedFarm
from tests.unit.control.placement.test_memory import GIB, Farm, need


def farm_of(*memories: float) -> Farm:
    return Farm(*(Host(f"h{index}", memory=int(gib * GIB)) for index, gib in enumerate(memories)))


def placed(farm: Farm) -> PlacedFarm:
    return PlacedFarm(list(farm.specs.values()), list(farm.hosts.values()), farm.held, farm.needs, {})


def planned(farm: Farm) -> list[Move]:
    return placed(farm).moves()


def assert_fits(farm: Farm, held: AssignmentsByHost) -> None:
    for host in farm.hosts.values():
        assert sum(sum(one.memory) for one in held.get(host.id, ())) <= (host.memory or 0), host.id


def carried_out(farm: Farm) -> tuple[AssignmentsByHost, list[Move]]:
    """Every move made, with both replicas there while one drains; no host is exceeded at any moment."""
    state = placed(farm).settled()
    made: list[Move] = []
    while (move := state.next_move()) is not None:
        began = state.after(move)
        assert_fits(farm, began.by_host)
        assert_fits(farm, began.settled().by_host)
        state = began.without_old(move).settled()
        assert_fits(farm, state.by_host)
        made.append(move)
        assert len(made) < 30, "it never ends"
    return state.by_host, made


def test_a_replica_moves_so_that_a_model_finds_room() -> None:
    farm = farm_of(4, 2.5)
    farm.want("small", need(1))
    farm.settle()
    assert [one.spec.name for one in farm.held["h0"]] == ["small"]
    farm.want("large", need(4))
    farm.settle()
    assert list(farm.unplaced) == ["large"]
    [move] = planned(farm)
    assert (move.model, move.source, move.target, move.why) == ("small", "h0", "h1", "makes room for large")
    state, _ = carried_out(farm)
    assert [one.spec.name for one in state["h0"]] == ["large"]


def test_the_replica_that_drains_and_its_successor_fit_beside_each_other() -> None:
    """No host has room for a second replica of the one that would have to go: nothing is moved."""
    farm = farm_of(4, 2.5)
    farm.want("small", need(3))
    farm.settle()
    farm.want("large", need(4))
    farm.settle()
    assert planned(farm) == []


def test_memory_is_used_more_evenly() -> None:
    farm = farm_of(8, 8)
    for name in ("a", "b"):
        farm.want(name, need(2))
    farm.hosts["h1"] = Host("h1", memory=8 * GIB, drained=True)
    farm.settle()
    farm.hosts["h1"] = Host("h1", memory=8 * GIB)
    assert [len(farm.held[name]) for name in ("h0", "h1")] == [2, 0]
    [move] = planned(farm)
    assert (move.source, move.target, move.why) == ("h0", "h1", "spreads memory more evenly")
    state, _ = carried_out(farm)
    assert [len(state[name]) for name in ("h0", "h1")] == [1, 1]


def test_what_is_even_stays() -> None:
    farm = farm_of(8, 8)
    for name in ("a", "b"):
        farm.want(name, need(2))
    farm.settle()
    assert planned(farm) == []


@pytest.mark.parametrize("host", [Host("h1"), Host("h1", memory=8 * GIB, drained=True), Host("h1", ("cuda:0",))])
def test_nothing_moves_to_a_host_that_plans_no_memory_or_takes_nothing(host: Host) -> None:
    farm = farm_of(8)
    for name in ("a", "b"):
        farm.want(name, need(2))
    farm.settle()
    farm.hosts["h1"], farm.held["h1"] = host, []
    assert planned(farm) == []


MODELS = st.lists(st.tuples(st.floats(0.5, 5), st.integers(1, 2), st.booleans()), min_size=1, max_size=5)
HOSTS = st.lists(st.floats(1, 10), min_size=2, max_size=4)


def one_move_places_all(farm: Farm) -> bool:
    """By hand, with bytes alone: some replica fits on another host beside what is there, and then all the rest finds
    a host by the planner's own order."""
    hosts = list(farm.hosts.values())
    for source, target in product(hosts, hosts):
        for one in farm.held[source.id]:
            size = sum(one.memory)
            free = (target.memory or 0) - farm.used(target.id)
            if source.id == target.id or size > free or len(one.ranks) < one.spec.tp:
                continue
            held = {host: [other for other in own if other is not one] for host, own in farm.held.items()}
            held[target.id] = [*held[target.id], one]
            if not replace(placed(farm), by_host=held).settled().unplaced():
                return True
    return False


def play(memories: list[float], models: list[tuple[float, int, bool]]) -> None:
    farm = farm_of(*memories)
    for index, (gib, replicas, named) in enumerate(models):
        model_need: ModelNeed = need(gib, per_token=0 if named else 2**16, context=1024)
        farm.want(f"m{index}", model_need, replicas=replicas)
        farm.settle()
    before = placed(farm).unplaced()
    could = bool(before) and one_move_places_all(farm)
    state, _ = carried_out(farm)
    rest = replace(placed(farm), by_host=state).unplaced()
    assert not (could and rest), rest
    assert len(rest) <= len(before)


@settings(max_examples=150, deadline=None)
@given(HOSTS, MODELS)
def test_no_host_is_exceeded_and_what_one_move_can_place_is_placed(
    memories: list[float], models: list[tuple[float, int, bool]]
) -> None:
    play(memories, models)


def test_room_of_a_target_is_what_is_left_there() -> None:
    """The control: a place on an empty host would exceed it."""
    farm = farm_of(4, 2)
    farm.want("m", need(3))
    [action] = place(farm.specs["m"], "r9", {}, Room([farm.hosts["h1"]], farm.needs))
    assert isinstance(action, Unplaceable)
