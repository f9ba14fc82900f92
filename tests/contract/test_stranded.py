"""Requests of given-up models are ended: by the placement holder."""

from __future__ import annotations

import pytest

from api.background.orphans import OrphanReaper
from control import keys
from control.messages import ModelSpec
from control.placement.farm import hold_placement
from control.records import catalog
from control.replicas import health
from control.replicas.health import Status
from control.requests.upkeep import stranded as stranded_module
from control.requests.upkeep.stranded import LOOK_EVERY_S, UNPLACED_S, StrandedRequests, given_up
from tests.contract.conftest import MODEL, Farm

WHY = "Model folder '/models/m' does not exist"


class Clock:
    """The value of `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Holder:
    """The holder of the placement lock, a look after another."""

    def __init__(self, farm: Farm, clock: Clock) -> None:
        self.farm, self.clock, self.stranded = farm, clock, StrandedRequests(farm.client)

    def look(self, *names: str, replicas: int = 1, after: float = LOOK_EVERY_S) -> None:
        self.clock.now += after
        self.stranded.end([ModelSpec(name=MODEL, source="x", replicas=replicas)], {MODEL: list(names)})

    def fails(self, replica: str, why: str = WHY) -> None:
        health.write_status(self.farm.client, MODEL, replica, "failed", why)


@pytest.fixture
def holder(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> Holder:
    clock = Clock()
    monkeypatch.setattr(stranded_module.time, "monotonic", clock)
    return Holder(farm, clock)


def test_requests_of_a_model_without_a_replica_end_with_the_cause(farm: Farm, holder: Holder) -> None:
    """Queued and running ones, as soon as the lock is free; a request that comes too late ends at the next look."""
    lease = farm.lead()
    farm.put("running")
    farm.claim(lease)
    farm.put("queued")
    holder.fails("r0")
    holder.look("r0")
    assert (farm.field("running", "state"), farm.field("queued", "state")) == ("running", "finished")
    farm.lose(lease)
    farm.put("late")
    holder.look("r0")
    for rid in ("running", "queued", "late"):
        [entry] = farm.look(rid).entries
        assert (
            entry.finish == "unavailable"
            and WHY in (entry.cause or "")
            and "furrow models reload" in (entry.cause or "")
        )
        assert farm.field(rid, "state") == "finished"
    assert farm.load("queued") == 0


@pytest.mark.parametrize("state", [None, "starting", "backoff", "running", "draining", "unplaceable"])
def test_requests_wait_for_a_replica_that_may_serve_yet(farm: Farm, holder: Holder, state: str | None) -> None:
    """One that recovers, or whose host is away, may go on with them."""
    farm.put("a")
    holder.fails("r0")
    if state is not None:
        health.write_status(farm.client, MODEL, "r1", state, "")  # type: ignore[arg-type]
    for _ in range(5):
        holder.look("r0", "r1", replicas=2, after=UNPLACED_S)
    assert farm.field("a", "state") == "queued"


def test_requests_wait_a_while_for_a_host_that_may_come_back(farm: Farm, holder: Holder) -> None:
    """Of two replicas one was given up, and the other has no host; that may be its agent's restart."""
    farm.put("a")
    holder.fails("r0")
    holder.look("r0", replicas=2)
    holder.look("r0", replicas=2, after=UNPLACED_S - 1)
    assert farm.field("a", "state") == "queued"
    holder.look("r0", replicas=2)
    assert farm.field("a", "state") == "finished"


def test_a_look_costs_nothing_before_it_is_due(farm: Farm, holder: Holder) -> None:
    """The placement holder calls it in every tick."""
    holder.look("r0")
    holder.fails("r0")
    farm.put("a")
    holder.look("r0", after=LOOK_EVERY_S / 2)
    assert farm.field("a", "state") == "queued"


def test_without_an_agent_an_api_process_ends_them(farm: Farm, holder: Holder) -> None:
    """Only while nobody holds the placement lock: who does may know of a host that the replica goes to."""
    catalog.put_spec(farm.client, ModelSpec(name=MODEL, source="x"))
    farm.run(catalog.put_replica(MODEL, "r0", catalog.Assigned(revision=1, tp=1)))
    farm.put("a")
    holder.fails("r0")
    reaper = OrphanReaper(farm.client, "a1")
    assert farm.run(hold_placement("host"))
    farm.client.pexpire(keys.PLACEMENT_LOCK, 60_000)
    reaper.reap()
    assert farm.field("a", "state") == "queued"
    for lock in (keys.PLACEMENT_LOCK, keys.REAPER_LOCK):
        farm.client.delete(lock)
    reaper.reap()
    [entry] = farm.look("a").entries
    assert entry.finish == "unavailable" and WHY in (entry.cause or "")


def test_the_first_replica_names_the_cause() -> None:
    """r2 comes before r10; a model without replicas was not given up."""
    failed = {name: Status(state="failed", detail=f"{name} is broken") for name in ("r10", "r2")}
    assert given_up(failed) == "replica r2 (and 1 more) was given up: r2 is broken"
    assert given_up(failed | {"r3": Status(state="running")}) is None
    assert given_up(failed | {"r3": None}) is None
    assert given_up({}) is None
