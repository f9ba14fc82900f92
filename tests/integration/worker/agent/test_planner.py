"""Desired models become assignments: turns of the planner on a real server, and what nobody will serve is ended."""

from __future__ import annotations

import pytest

from control import requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.placement import farm, membership
from control.placement.placement import Host
from control.records import catalog
from control.requests import Enqueue
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.waiting import until
from worker.agent import planner as planner_module
from worker.agent.planner import Planner


@pytest.fixture
def unplaceable() -> list[tuple[str, str, str]]:
    """Messages that the planner reported."""
    return []


@pytest.fixture
def planner(redis: ReplicaRedis, unplaceable: list[tuple[str, str, str]]) -> Planner:
    return Planner(redis.client, lambda *report: unplaceable.append(report))


def lives(redis: ReplicaRedis, host: str, *devices: str) -> None:
    membership.beat_host(redis.client, Host(host, devices), 1, 1)


def dies(redis: ReplicaRedis, host: str) -> None:
    redis.client.delete(f"furrow:host:{host}")


def put(redis: ReplicaRedis, rid: str, deadline_ms: int = 0) -> None:
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=1))
    redis.run(requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant="t", deadline_ms=deadline_ms)))


def state(redis: ReplicaRedis, rid: str) -> str | None:
    return redis.client.hget(ModelKeys(MODEL).request(rid), "state")


def test_a_desired_model_is_assigned_and_a_tombstone_is_passed_on(redis: ReplicaRedis, planner: Planner) -> None:
    """The host that has it drains it; only when it has let go is the model forgotten."""
    lives(redis, "one")
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source="/m", tp=2))
    planner.turn()
    [assignment] = farm.assignments(redis.client, "one")
    assert (assignment.replica, assignment.ranks, assignment.devices) == (REPLICA, [0, 1], ["cpu", "cpu"])
    catalog.tombstone(redis.client, MODEL)
    planner.turn()
    assert farm.assignments(redis.client, "one")[0].withdrawn
    assert catalog.get_spec(redis.client, MODEL) is not None
    farm.remove_assignment(redis.client, "one", MODEL, REPLICA)
    planner.turn()
    assert catalog.get_spec(redis.client, MODEL) is None


def test_a_dead_host_s_replica_moves(redis: ReplicaRedis, planner: Planner) -> None:
    """A host that does not beat can't let go: the assignment is taken from it and given to one that lives."""
    lives(redis, "one")
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source="/m"))
    planner.turn()
    dies(redis, "one")
    lives(redis, "two")
    planner.turn()
    planner.turn()
    assert farm.assignments(redis.client, "one") == []
    assert [assignment.replica for assignment in farm.assignments(redis.client, "two")] == [REPLICA]


def test_what_no_host_can_hold_is_reported(
    redis: ReplicaRedis, planner: Planner, unplaceable: list[tuple[str, str, str]]
) -> None:
    """The model and the reason come back to the agent, which makes them the replica's state."""
    lives(redis, "one")
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source="/m", devices=["cuda:0"]))
    planner.turn()
    [(model, replica, why)] = unplaceable
    assert (model, replica) == (MODEL, REPLICA) and "cuda:0" in why and "one" in why
    assert farm.assignments(redis.client, "one") == []


def test_requests_of_an_unloaded_model_end(redis: ReplicaRedis, planner: Planner) -> None:
    """Requests for a model that will not come back end at once."""
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source="/m"))
    put(redis, "waits")
    catalog.tombstone(redis.client, MODEL)
    planner.turn()
    assert state(redis, "waits") not in ("queued", "running")
    [(_, entry)] = redis.client.xrange(ModelKeys(MODEL).log("waits"))
    assert f"the model '{MODEL}' was unloaded" in entry["e"]


def test_a_deadline_passes_without_any_leader(
    redis: ReplicaRedis, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of a model that never came up ends in time, and one without a deadline waits."""
    monkeypatch.setattr(planner_module, "EXPIRE_EVERY_S", 0.0)
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source="/m"))
    put(redis, "short", deadline_ms=1)
    put(redis, "long")

    def expired() -> bool:
        planner.turn()
        return state(redis, "short") == "expired"

    until(expired, 40.0)
    assert state(redis, "long") == "queued"


def test_a_planner_with_nothing_to_do_rests(
    redis: ReplicaRedis, planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While something is to be done every look is a turn; after that a turn comes once the rest is over."""
    clock = [100.0]
    monkeypatch.setattr(planner_module.time, "monotonic", lambda: clock[0])
    lives(redis, "one")
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source="/m"))
    planner.tend()
    assert farm.assignments(redis.client, "one")
    catalog.tombstone(redis.client, MODEL)
    planner.tend()  # the assignment was something to do
    assert farm.assignments(redis.client, "one")[0].withdrawn
    farm.remove_assignment(redis.client, "one", MODEL, REPLICA)
    planner.tend()  # a model that is not forgotten yet is, too
    assert catalog.get_spec(redis.client, MODEL) is None
    planner.tend()
    catalog.put_spec(redis.client, ModelSpec(name="another", source="/m"))
    planner.tend()
    assert farm.assignments(redis.client, "one") == []
    clock[0] += planner_module.REST_S
    planner.tend()
    assert [assignment.spec.name for assignment in farm.assignments(redis.client, "one")] == ["another"]
