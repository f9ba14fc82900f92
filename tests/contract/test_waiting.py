"""Requests that no leader is there to end: past their deadline, or of a model that is taken out of service."""

from __future__ import annotations

from control.requests.waiting import abandon, expire_waiting, waiting
from tests.contract.conftest import MODEL, Farm


def test_waiting_finds_every_queue(farm: Farm) -> None:
    """Requests of all classes and tenants are found, with whose they are."""
    farm.put("a", tenant="t1")
    farm.put("b", tenant="t2", priority="high")
    farm.put("c", tenant="t2", priority="low")
    assert set(waiting(farm.client, MODEL)) == {("a", "t1"), ("b", "t2"), ("c", "t2")}


def test_a_passed_deadline_ends_a_waiting_request_without_a_leader(farm: Farm) -> None:
    """Only the one whose time is over ends, with a final entry for each choice."""
    farm.put("late", n=2, deadline_ms=1)
    farm.put("early", deadline_ms=60_000)
    while farm.field("late", "state") == "queued":
        expire_waiting(farm.client, MODEL)
    assert [(entry.choice, entry.finish) for entry in farm.look("late").entries] == [(0, "expired"), (1, "expired")]
    assert farm.field("early", "state") == "queued"


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
        assert (entry.finish, entry.cause, farm.field(rid, "state")) == ("error", "unloaded", "cancelled")
    assert waiting(farm.client, MODEL) == []
