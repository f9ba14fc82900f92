"""One API process does the rounds for all: reaping, and reading the state of every model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from api.background.orphans import OrphanReaper
from control import constants, keys, requests
from control.messages import ModelSpec
from control.placement.farm import claim_placement, hold_placement, read_farm_view, release_placement
from control.records import catalog
from control.redis import connection
from control.replicas import model_overviews
from tests.contract.conftest import Farm
from tests.waiting import until
from worker.agent.host_replicas import read_host


def test_one_process_makes_a_round(farm: Farm) -> None:
    """However many try; the next round is anybody's, so that no process can leave it undone."""
    assert farm.run(requests.take_round("a"))
    assert not farm.run(requests.take_round("b")) and not farm.run(requests.take_round("a"))
    assert 0 < farm.client.pttl(keys.REAPER_LOCK) <= constants.ROUND_MS < 1000
    farm.client.delete(keys.REAPER_LOCK)  # as it lapses
    assert farm.run(requests.take_round("b"))


def test_one_agent_holds_the_placement_lock(farm: Farm) -> None:
    """Until it has not renewed it for its life; the holder's life begins anew with each call."""
    assert farm.run(hold_placement("one")) and not farm.run(hold_placement("two"))
    farm.client.pexpire(keys.PLACEMENT_LOCK, 50)
    assert farm.run(hold_placement("one")) and farm.client.pttl(keys.PLACEMENT_LOCK) > constants.HEARTBEAT_MS / 2
    farm.client.delete(keys.PLACEMENT_LOCK)  # as it lapses
    assert farm.run(hold_placement("two")) and not farm.run(hold_placement("one"))


def test_the_placement_lock_is_handed_over_between_turns(farm: Farm) -> None:
    """To the first process that waits for it, when its holder asks for it again; a wait prolongs nothing."""
    assert farm.run(hold_placement("one"))
    farm.client.pexpire(keys.PLACEMENT_LOCK, 900)
    assert not farm.run(claim_placement("move")) and not farm.run(claim_placement("another move"))
    assert 0 < farm.client.pttl(keys.PLACEMENT_LOCK) <= 900
    assert not farm.run(hold_placement("two")) and not farm.run(claim_placement("move"))
    assert not farm.run(hold_placement("one")) and not farm.run(hold_placement("one"))
    assert farm.run(claim_placement("move")) and not farm.run(hold_placement("two"))
    farm.run(release_placement("move"))
    until(lambda: farm.run(hold_placement("two")), 1.0)


def test_overviews_are_read_by_one_process(farm: Farm) -> None:
    """The others take what it wrote, whole, until its turn lapses."""
    catalog.put_spec(farm.client, ModelSpec(name="one", source="x", replicas=2))
    for key in (keys.OVERVIEWS, keys.OVERVIEWS_LOCK):
        farm.client.delete(key)
    first = model_overviews.shared_overviews(farm.client)
    assert first == model_overviews.overviews(farm.client) and [one.model for one in first] == ["one"]
    catalog.put_spec(farm.client, ModelSpec(name="two", source="x"))
    assert model_overviews.shared_overviews(farm.client) == first
    farm.client.delete(keys.OVERVIEWS_LOCK)
    assert [one.model for one in model_overviews.shared_overviews(farm.client)] == ["one", "two"]


def test_overviews_that_are_not_there_or_can_not_be_read_are_read_anew(farm: Farm) -> None:
    """After a loss of data, or beside a process of another version."""
    catalog.put_spec(farm.client, ModelSpec(name="one", source="x"))
    model_overviews.shared_overviews(farm.client)
    for change in (lambda: farm.client.delete(keys.OVERVIEWS), lambda: farm.client.set(keys.OVERVIEWS, '[{"x":1}]')):
        change()
        assert [one.model for one in model_overviews.shared_overviews(farm.client)] == ["one"]


def test_a_round_at_rest_is_few_round_trips(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the planner, of an agent that reads what it is to run, and of an API process; most of what idleness costs."""
    catalog.put_spec(farm.client, ModelSpec(name="one", source="x"))
    sent: list[int] = []

    class Counted(connection.Posted):
        def __init__(self, client: Any, calls: Any) -> None:
            sent.append(len(calls))
            super().__init__(client, calls)

    monkeypatch.setattr(connection, "Posted", Counted)

    def trips(act: Callable[[], object]) -> int:
        sent.clear()
        act()
        return len(sent)

    assert trips(lambda: read_farm_view(farm.client)) == 2
    assert trips(lambda: read_host(farm.client, "h", {("one", "r0"): 1}, [hold_placement("h")])) == 1
    farm.client.set(keys.PLACEMENT_LOCK, "h")  # for as long as the test takes
    reaper = OrphanReaper(farm.client, "a")
    assert trips(reaper.reap) == 3, "the first looks for processes that are gone"
    farm.client.delete(keys.REAPER_LOCK)
    assert trips(reaper.reap) == 2
    farm.client.set(keys.REAPER_LOCK, "a")
    assert trips(OrphanReaper(farm.client, "b").reap) == 1
    assert trips(lambda: model_overviews.overviews(farm.client)) == 3
