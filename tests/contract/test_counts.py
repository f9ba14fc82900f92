"""Counts of a queue that are wrong are repaired: once a leader has found it empty, or has counted what waits."""

from __future__ import annotations

from typing import Any

import pytest

from control import requests
from control.errors import QueueFull
from control.requests.upkeep import counts as counting
from tests.contract.conftest import MODEL, Farm, rids


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


def counts(farm: Farm) -> dict[str, object]:
    """All that is counted of what waits, with the turns."""
    fields = [name for name in sorted(farm.client.hgetall(farm.keys.load)) if name.startswith(("queued", "sequences"))]
    zsets = (farm.keys.waiting, farm.keys.turns, farm.keys.served)
    counts: dict[str, object] = {name: farm.load(name) for name in fields if farm.load(name)}
    for key in [zset(name) for zset in zsets for name in ("high", "normal", "low")]:
        counts[key] = farm.client.zrange(key, 0, -1, withscores=True)
    return counts


def crowd(farm: Farm) -> None:
    """Some run and some wait, of several tenants and classes; one tenant's queue has more than a page."""
    lease = farm.lead()
    farm.put("r0", tenant="runs", prompt=7)
    farm.put("r1", tenant="both", prompt=7)
    farm.claim(lease)
    for index in range(counting.PAGE + 3):
        farm.put(f"many{index}", tenant="many", prompt=2, priority="low")
    farm.put("b", tenant="both", prompt=5, n=3)
    farm.put("h", tenant="high tenant", prompt=9, n=2, priority="high")


def test_a_count_of_a_right_queue_changes_nothing(farm: Farm) -> None:
    """Running requests, page bounds, and a tenant with a space in its name."""
    crowd(farm)
    before = counts(farm)
    assert counting.count(farm.client, MODEL).wrong == []
    assert requests.recount(farm.client, MODEL)
    assert counts(farm) == before and farm.load("queued") == counting.PAGE + 5


def test_wrong_counts_are_put_right_while_others_wait(farm: Farm) -> None:
    """A thousand places, tokens and sequences leaked, a tenant's turn lost and one made up: all as before, everybody
    gets in again."""
    crowd(farm)
    before = counts(farm)
    leak(farm, 1000)
    farm.client.hincrby(farm.keys.load, "sequences:normal", 999)
    farm.client.zadd(farm.keys.waiting("normal"), {"both": 40, "ghost": 9})
    farm.client.zadd(farm.keys.turns("normal"), {"ghost": 5})
    farm.client.zadd(farm.keys.served("normal"), {"ghost": 5})
    farm.client.zrem(farm.keys.turns("high"), "high tenant")
    farm.client.zrem(farm.keys.served("low"), "many")
    bound = counting.PAGE + 6
    with pytest.raises(QueueFull):
        farm.put("x", tenant="many", max_queued_requests=bound)
    assert requests.recount(farm.client, MODEL)
    assert counts(farm) == before
    farm.put("x", tenant="many", max_queued_requests=bound)


def test_what_comes_during_the_count_stays_counted(farm: Farm) -> None:
    """A count that was overtaken by an enqueue, a claim or a move within the queue is not written."""
    crowd(farm)
    leak(farm, 10)
    lease = farm.lead("r1", "two")
    overtaken = counting.count(farm.client, MODEL)
    farm.put("late", tenant="late", prompt=4)
    assert not counting.correct(farm.client, MODEL, overtaken)
    overtaken = counting.count(farm.client, MODEL)
    farm.claim(lease, 1)
    assert not counting.correct(farm.client, MODEL, overtaken)
    assert requests.recount(farm.client, MODEL)
    assert farm.load("queued") == counting.PAGE + 5
    assert farm.load("queued_tokens") == 2 * (counting.PAGE + 3) + 4 + 5


def test_a_queue_that_never_stands_still_is_left_alone(farm: Farm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something comes during each count: nothing is written, and that is told."""
    leak(farm, 10)
    honest = counting.count

    def overtaken(*words: Any) -> counting.QueueCounts:
        counted = honest(*words)
        farm.put(f"late{farm.load('enqueued')}")
        return counted

    monkeypatch.setattr(counting, "count", overtaken)
    monkeypatch.setattr(counting, "PAUSES_S", (0.0,) * 8)
    assert not requests.recount(farm.client, MODEL)
    assert farm.load("queued") == 10 + len(counting.PAUSES_S)
