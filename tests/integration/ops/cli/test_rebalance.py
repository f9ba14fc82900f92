"""`furrow models rebalance` moves replicas: on a real server; what hosts and ranks would say of a move is written by
the tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from click.testing import CliRunner

from control import keys
from control.errors import ModelUnavailable, SettingsError
from control.messages import Assignment, ModelSpec
from control.operations import rebalance as operation
from control.placement import farm, membership
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect, run
from control.replicas import model_overviews
from control.replicas.model_overviews import ReplicaOverview, ReplicaState
from ops.cli.hosts import rebalance
from tests.servers import Server
from tests.waiting import until

GIB = 2**30


@pytest.fixture
def client(new_server: Server) -> Iterator[SyncRedis]:
    """Two hosts; `small` is on the larger one, where alone `large` has room."""
    with connect(new_server.url) as client:
        client.flushall()
        for name, size in (("small", 1), ("large", 4)):
            spec = ModelSpec(name=name, source="/m", revision=1)
            catalog.put_spec(client, spec)
            rank = RankNeed(weights=size * GIB, kv=0, step=0, process=0)
            run(client, farm.put_need(name, ModelNeed(revision=1, context=8, ranks=[rank])))
        for host, size in (("a", 4), ("b", 2)):
            membership.beat_host(client, Host(host, memory=size * GIB), 1, 1)
        spec = catalog.get_spec(client, "small")
        assert spec is not None
        farm.assign(client, "a", Assignment(spec=spec, replica="r0", ranks=[0], devices=["cpu"], memory=[GIB]))
        yield client


def ask(url: str, *words: str) -> str:
    ended = CliRunner().invoke(rebalance, [*words, "--redis", url], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.output


def held(client: SyncRedis, host: str) -> list[tuple[str, str, bool]]:
    return [(one.spec.name, one.replica, one.withdrawn) for one in farm.assignments(client, host)]


def says(monkeypatch: pytest.MonkeyPatch, client: SyncRedis, state: ReplicaState) -> None:
    """The hosts and the agent that plans carry a move out at once, and the successor is in this state."""
    overview = model_overviews.overview(client, "small")
    replica = ReplicaOverview("r1", 1, state, "why", "b", ["cpu"], 1, 0, [])

    def looked_at(client: SyncRedis, model: str) -> model_overviews.Overview:
        farm.remove_assignment(client, "a", "small", "r0")
        large = catalog.get_spec(client, "large")
        assert large is not None
        assigned = Assignment(spec=large, replica="r0", ranks=[0], devices=["cpu"], memory=[4 * GIB])
        farm.assign(client, "a", assigned)
        return replace(overview, replicas=[replica])

    monkeypatch.setattr(model_overviews, "overview", looked_at)


def test_a_dry_run_moves_nothing(client: SyncRedis, new_server: Server) -> None:
    assert ask(new_server.url, "--dry-run") == "small:r0 moves from a to b with 1 GiB: makes room for large.\n"
    answer = json.loads(ask(new_server.url, "--dry-run", "--json"))
    [move] = answer["moves"]
    assert answer["dry_run"] and (move["model"], move["source"], move["target"]) == ("small", "a", "b")
    assert held(client, "a") == [("small", "r0", False)] and held(client, "b") == []


def test_a_move_drains_the_replica_and_starts_its_successor_elsewhere(client: SyncRedis, new_server: Server) -> None:
    state = operation.read_farm(client)
    move = state.next_move()
    assert move is not None and state.is_settled
    assert operation.begin(client, move, state)
    assert held(client, "a") == [("small", "r0", True)] and held(client, "b") == [("small", "r1", False)]
    assert not operation.read_farm(client).is_settled and not operation.is_over(client, move)


def test_the_command_ends_when_nothing_is_to_be_moved(
    client: SyncRedis, new_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, client, "loaded")
    assert "makes room for large" in ask(new_server.url)
    assert held(client, "a") == [("large", "r0", False)] and held(client, "b") == [("small", "r1", False)]
    assert ask(new_server.url) == "Nothing is to be moved.\n"


def test_a_successor_that_fails_ends_the_command(
    client: SyncRedis, new_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, client, "failed")
    with pytest.raises(ModelUnavailable, match="r1 on b"):
        CliRunner().invoke(rebalance, ["--redis", new_server.url], catch_exceptions=False)


def test_a_move_that_the_planner_has_overtaken_is_not_begun(client: SyncRedis) -> None:
    """It gave `large` the room that the move had found; both would be more than the host has."""
    state = operation.read_farm(client)
    move = state.next_move()
    assert move is not None
    large = catalog.get_spec(client, "large")
    assert large is not None
    assigned = Assignment(spec=large, replica="r0", ranks=[0], devices=["cpu"], memory=[2 * GIB])
    farm.assign(client, "b", assigned)
    assert not operation.begin(client, move, state)
    assert held(client, "a") == [("small", "r0", False)] and held(client, "b") == [("large", "r0", False)]


def test_a_move_waits_for_the_turn_of_the_agent_that_plans(client: SyncRedis) -> None:
    """It gets the lock when the agent asks for its next turn, not while one lasts, and gives it back."""
    state = operation.read_farm(client)
    move = state.next_move()
    assert move is not None
    assert run(client, farm.hold_placement("agent"))
    begun: list[bool] = []
    thread = threading.Thread(target=lambda: begun.append(operation.begin(client, move, state)))
    thread.start()
    until(lambda: b"\n" in str(client.get(keys.PLACEMENT_LOCK)).encode(), 5.0)
    assert held(client, "a") == [("small", "r0", False)] and not begun
    assert not run(client, farm.hold_placement("agent"))
    thread.join()
    assert begun == [True] and held(client, "a") == [("small", "r0", True)]
    until(lambda: run(client, farm.hold_placement("agent")), 1.0)


def test_a_move_that_no_agent_lets_plan_is_refused(client: SyncRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    state = operation.read_farm(client)
    move = state.next_move()
    assert move is not None
    monkeypatch.setattr(operation, "HANDED_OVER_S", 0.1)
    client.set(keys.PLACEMENT_LOCK, "agent")
    with pytest.raises(SettingsError, match="no agent let this command plan"):
        operation.begin(client, move, state)
