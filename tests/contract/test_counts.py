"""Counts of a queue that disagree with it, as after a fault: they are right again once a leader has found it empty."""

from __future__ import annotations

import pytest

from control.errors import QueueFull
from tests.contract.conftest import Farm, rids


def leak(farm: Farm, places: int) -> None:
    """Count requests that are nowhere."""
    for name, count in (("queued", places), ("queued:normal", places), ("queued_tokens", 100 * places)):
        farm.client.hincrby(farm.keys.load, name, count)


def test_lost_places_are_found_by_the_next_leader(farm: Farm) -> None:
    """Ten places that nobody holds shut everybody out, until a leader starts and claims."""
    leak(farm, 10)
    with pytest.raises(QueueFull):
        farm.put("a", max_queued_requests=5)
    lease = farm.lead()
    assert rids(farm.claim(lease)) == []
    assert (farm.load("queued"), farm.load("queued:normal"), farm.load("queued_tokens")) == (0, 0, 0)
    for rid in "abcde":
        farm.put(rid, max_queued_requests=5)
    assert rids(farm.claim(lease)) == ["a", "b", "c", "d", "e"]
    assert (farm.load("queued"), farm.load("queued_tokens")) == (0, 0)


def test_what_waits_stays_counted(farm: Farm) -> None:
    """A claim that has no room for what waits changes no count."""
    lease = farm.lead()
    for rid in "ab":
        farm.put(rid, prompt=5)
    farm.claim(lease, 1)
    assert (farm.load("queued"), farm.load("queued:normal"), farm.load("queued_tokens")) == (1, 1, 5)
    leak(farm, 3)
    farm.claim(lease, 1)
    farm.claim(lease, 1)
    assert (farm.load("queued"), farm.load("queued:normal"), farm.load("queued_tokens")) == (0, 0, 0)
