"""The rounds that one API process does for all: reaping, and reading the state of every model."""

from __future__ import annotations

from control import constants, keys, requests
from control.messages import ModelSpec
from control.records import catalog
from control.replicas import health
from tests.contract.conftest import Farm


def test_one_process_makes_a_round(farm: Farm) -> None:
    """However many try; the next round is anybody's, so that no process can leave it undone."""
    assert requests.take_round(farm.client, "a")
    assert not requests.take_round(farm.client, "b") and not requests.take_round(farm.client, "a")
    assert 0 < farm.client.pttl(keys.REAPER_LOCK) <= constants.ROUND_MS < 1000
    farm.client.delete(keys.REAPER_LOCK)  # as it lapses
    assert requests.take_round(farm.client, "b")


def test_overviews_are_read_by_one_process(farm: Farm) -> None:
    """The others take what it wrote, whole, until its turn lapses."""
    catalog.put_spec(farm.client, ModelSpec(name="one", source="x", replicas=2))
    for key in (keys.OVERVIEWS, keys.OVERVIEWS_LOCK):
        farm.client.delete(key)
    first = health.shared_overviews(farm.client)
    assert first == health.overviews(farm.client) and [one.model for one in first] == ["one"]
    catalog.put_spec(farm.client, ModelSpec(name="two", source="x"))
    assert health.shared_overviews(farm.client) == first
    farm.client.delete(keys.OVERVIEWS_LOCK)
    assert [one.model for one in health.shared_overviews(farm.client)] == ["one", "two"]


def test_overviews_that_are_not_there_or_can_not_be_read_are_read_anew(farm: Farm) -> None:
    """After a loss of data, or beside a process of another version."""
    catalog.put_spec(farm.client, ModelSpec(name="one", source="x"))
    health.shared_overviews(farm.client)
    for change in (lambda: farm.client.delete(keys.OVERVIEWS), lambda: farm.client.set(keys.OVERVIEWS, '[{"x":1}]')):
        change()
        assert [one.model for one in health.shared_overviews(farm.client)] == ["one"]
