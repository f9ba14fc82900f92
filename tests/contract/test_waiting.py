"""Requests that no leader will end are ended: past their deadline, or of a model that is taken out of service."""

from __future__ import annotations

import pytest

from control import requests
from control.constants import HAND_OUT, HAND_OUT_CHOICES
from control.errors import ArgumentsRefused
from control.redis.connection import Call
from control.requests.ending import expire, expire_waiting
from control.requests.upkeep.stranded import PAGE, abandon
from tests.contract.conftest import MODEL, Farm


def test_the_index_of_deadlines_holds_what_waits_and_nothing_else(farm: Farm) -> None:
    """Enqueued, claimed, requeued, cancelled: a request is in the index while it waits, at its own deadline."""

    def indexed() -> set[str]:
        return set(farm.client.zrange(farm.keys.deadlines, 0, -1))

    farm.put("a", tenant="t1")
    farm.put("b", tenant="t2", priority="high")
    farm.put("c", tenant="t2", priority="low")
    assert indexed() == {"a", "b", "c"}
    lease = farm.lead()
    farm.claim(lease, requests_=2)
    assert indexed() == {"c"}
    farm.run(requests.requeue(lease, "a"))
    assert indexed() == {"a", "c"}
    assert farm.client.zscore(farm.keys.deadlines, "a") == float(farm.field("a", "deadline") or 0)
    for rid, tenant in (("a", "t1"), ("b", "t2"), ("c", "t2")):
        farm.run(requests.cancel(MODEL, rid, tenant))
    assert indexed() == set()


def test_expired_requests_end_in_batches(farm: Farm) -> None:
    """However many are due, a call ends a batch; one whose hash is gone leaves the index and costs no further look."""
    for index in range(HAND_OUT + 3):
        farm.put(f"r{index}", deadline_ms=1)
    farm.client.zadd(farm.keys.deadlines, {f"r{index}": index for index in range(HAND_OUT + 3)})
    farm.client.delete(farm.keys.request("r0"))
    assert farm.run(expire(MODEL)) == (HAND_OUT - 1, True)
    assert farm.run(expire(MODEL)) == (3, False)
    assert farm.run(expire(MODEL)) == (0, False)


def test_a_batch_of_expired_requests_is_bounded_by_their_choices(farm: Farm) -> None:
    """Each choice takes a log entry: a call ends no more requests once HAND_OUT_CHOICES choices have ended."""
    for index in range(5):
        farm.put(f"r{index}", n=HAND_OUT_CHOICES // 2, deadline_ms=1)
    farm.client.zadd(farm.keys.deadlines, {f"r{index}": index for index in range(5)})
    assert [farm.run(expire(MODEL)) for _ in range(3)] == [(2, True), (2, True), (1, False)]


def test_a_passed_deadline_ends_a_waiting_request_without_a_leader(farm: Farm) -> None:
    """Only the one whose time is over ends, with a final entry for each choice."""
    farm.put("late", n=2, deadline_ms=1)
    farm.put("early", deadline_ms=60_000)
    while farm.field("late", "state") == "queued":
        expire_waiting(farm.client, [MODEL, "another"])
    assert [(entry.choice, entry.finish) for entry in farm.look("late").entries] == [(0, "expired"), (1, "expired")]
    assert farm.field("early", "state") == "queued"


def test_abandon_finds_every_request_whether_its_tenant_waits_or_not(farm: Farm) -> None:
    """A tenant whose requests all run has no turn; more requests than a page, in every class, still all end."""
    for index in range(PAGE + 3):
        farm.put(f"running-{index}", tenant="runs")
    lease = farm.lead()
    farm.claim(lease, requests_=PAGE + 3)
    farm.put("high", tenant="t1", priority="high")
    farm.put("low", tenant="t2", priority="low")
    assert farm.load("queued") == 2 and farm.client.zscore(farm.keys.turns("normal"), "runs") is None
    farm.lose(lease)
    assert abandon(farm.client, MODEL, "given up", "finished", most=10) == 1 + PAGE, "it stops after a page"
    assert abandon(farm.client, MODEL, "given up", "finished", most=10) == 3 + 1
    assert abandon(farm.client, MODEL, "given up", "finished") == 0
    assert farm.load("queued") == 0 and farm.client.exists(farm.keys.queue("normal", "runs")) == 0
    for rid in ("running-0", f"running-{PAGE + 2}", "high", "low"):
        [entry] = farm.look(rid, tenant=farm.field(rid, "tenant") or "").entries
        assert (entry.finish, entry.cause, farm.field(rid, "state")) == ("unavailable", "given up", "finished")


def test_abandon_refuses_a_state_that_is_no_end(farm: Farm) -> None:
    """Nothing is written before the arguments are known to be right."""
    farm.put("a")
    before = farm.client.hgetall(farm.keys.request("a"))
    call = Call("abandon", (farm.keys.request("a"),), (farm.keys.base, "a", "why", "running"), int)
    with pytest.raises(ArgumentsRefused, match="one of cancelled, finished"):
        farm.run(call)
    assert farm.client.hgetall(farm.keys.request("a")) == before


def test_abandon_ends_what_waits_and_what_no_leader_runs(farm: Farm) -> None:
    """A request under a living leader goes on; without its lock it ends too, with the cause."""
    lease = farm.lead()
    farm.put("running")
    farm.claim(lease)
    farm.put("waiting")
    assert abandon(farm.client, MODEL, "unloaded") == 1
    assert farm.field("running", "state") == "running"
    farm.lose(lease)
    assert abandon(farm.client, MODEL, "unloaded") == 1
    for rid in ("running", "waiting"):
        [entry] = farm.look(rid).entries
        assert (entry.finish, entry.cause, farm.field(rid, "state")) == ("unavailable", "unloaded", "cancelled")
    assert not farm.client.exists(farm.keys.deadlines)


def test_open_requests_are_the_oldest_of_all_queues(farm: Farm) -> None:
    """A merge of the queues: one tenant's many requests hide nobody's older ones, and pages join without a gap."""
    for index in range(60):
        farm.put(f"r{index}", tenant=("often", "often", "seldom")[index % 3], priority=("high", "low")[index % 2])
    farm.claim(farm.lead(), requests_=5)
    listed = {one.id for one in requests.open_requests(farm.client, [MODEL], 45)}
    assert listed == {f"r{index}" for index in range(45)}
    assert len(requests.open_requests(farm.client, [MODEL], 100)) == 60
