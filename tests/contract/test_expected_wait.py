"""The expected wait is estimated; and a request beyond the bound is refused."""

from __future__ import annotations

import pytest

from control import requests
from control.errors import QueueFull
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, token


def busy(farm: Farm, seconds: float, ends: float) -> None:
    """The queue was worked off for so long lately, and so many requests ended meanwhile."""
    farm.client.hset(farm.keys.load, mapping={"busy_ms": 1000 * seconds, "busy_ends": ends, "busy_since": 1})


def test_the_queue_is_bounded_by_the_wait_to_be_expected(farm: Farm) -> None:
    """At two a second three may wait where one and a half seconds are allowed, and the refusal says why."""
    busy(farm, seconds=10, ends=19)
    for rid in ("a", "b", "c", "d"):
        farm.put(rid, max_queue_wait_ms=1500)
    with pytest.raises(QueueFull, match="the wait would be too long") as full:
        farm.put("e", max_queue_wait_ms=1500)
    assert (full.value.bound, full.value.queued, full.value.retry_after) == ("wait", 4, 2.0)
    assert farm.put("f", max_queue_wait_ms=0).position == 5


def test_what_first_tokens_take_beyond_the_wait_is_learnt(farm: Farm) -> None:
    """Where they come a second later than the queue explains, fewer may wait than by the queue alone; who has nobody
    ahead is let in all the same."""
    lease = farm.lead()
    farm.client.pexpire(lease.keys.lock, 60_000)
    busy(farm, seconds=10, ends=19)
    for index in range(80):
        farm.put(f"a{index}")
        farm.claim(lease, requests_=1)
        farm.client.hset(farm.keys.load, "busy_since", 1)
        farm.client.hincrby(farm.keys.request(f"a{index}"), "t_enqueued", -1000)
        farm.emit(lease, Emission(f"a{index}", 1, [token(1)]))
    assert 900 < float(farm.client.hget(farm.keys.load, "slip") or 0) < 1200
    busy(farm, seconds=10, ends=19)
    farm.put("b", max_queue_wait_ms=800)
    farm.put("c", max_queue_wait_ms=1600)
    with pytest.raises(QueueFull) as full:
        farm.put("d", max_queue_wait_ms=1600)
    assert 1.9 < full.value.retry_after < 2.2


def test_the_wait_counts_turns_and_classes(farm: Farm) -> None:
    """Behind a tenant's backlog another waits for its turn only, and a higher class not at all."""
    busy(farm, seconds=10, ends=9)
    for index in range(9):
        farm.put(f"a{index}", tenant="a")
    farm.put("b0", tenant="b", max_queue_wait_ms=2000)
    farm.put("b1", tenant="b", max_queue_wait_ms=2000)
    with pytest.raises(QueueFull):
        farm.put("b2", tenant="b", max_queue_wait_ms=2000)
    farm.put("c0", tenant="c", priority="high", max_queue_wait_ms=2000)
    with pytest.raises(QueueFull):
        farm.put("d0", tenant="d", priority="low", max_queue_wait_ms=2000)


def test_the_wait_counts_sequences(farm: Farm) -> None:
    """A request of 64 choices is 64 of what waits, and beside a hog's backlog a tenant's own one is its own alone."""
    busy(farm, seconds=10, ends=99)
    farm.put("hog", tenant="hog", n=128)
    farm.put("a0", tenant="a", n=64)
    with pytest.raises(QueueFull) as full:
        farm.put("a1", tenant="a", max_queue_wait_ms=10_000)
    assert full.value.retry_after == pytest.approx(12.8)
    farm.put("b0", tenant="b")
    assert farm.put("b1", tenant="b", max_queue_wait_ms=1000).position == 4
    assert farm.client.hget(farm.keys.load, "sequences:normal") == str(128 + 64 + 2)


def test_a_hog_s_ends_count_by_its_choices(farm: Farm) -> None:
    """Two of its requests, 128 choices each, ended in a minute and a half: 256 places were freed, so another tenant's
    second short request, with three sequences before it by turns, is let in."""
    lease = farm.lead()
    for rid in ("h0", "h1", "h2"):
        farm.put(rid, tenant="hog", n=128)
    farm.claim(lease, requests_=256)
    busy(farm, seconds=90, ends=0)
    for rid in ("h0", "h1"):
        farm.emit(lease, Emission(rid, 1, [last(seq + 1, choice=seq) for seq in range(128)], "finished"))
    assert 200 < float(farm.client.hget(farm.keys.load, "busy_ends") or 0) <= 256
    farm.put("a0", tenant="a")
    farm.put("a1", tenant="a", max_queue_wait_ms=2000)


def test_sequences_that_wait_are_counted_by_tenant(farm: Farm) -> None:
    """Claimed, put back, cancelled: each way in and out is counted, and nothing is left at the end."""
    lease = farm.lead()
    waiting = farm.keys.waiting("normal")
    farm.put("a", tenant="t", n=5)
    farm.put("b", tenant="t", n=2)
    farm.put("c", tenant="u", n=3)
    assert farm.client.zrange(waiting, 0, -1, withscores=True) == [("u", 3.0), ("t", 7.0)]
    farm.claim(lease, requests_=1)
    assert farm.client.zscore(waiting, "t") == 2
    farm.run(requests.requeue(lease, "a"))
    assert farm.client.zscore(waiting, "t") == 7
    for rid, tenant in (("a", "t"), ("b", "t"), ("c", "u")):
        farm.run(requests.cancel(MODEL, rid, tenant))
    assert farm.client.exists(waiting) == 0 and farm.load("sequences:normal") == 0


@pytest.mark.parametrize(("seconds", "ends"), [(0.0, 0.0), (19.0, 0.0), (19.0, 3.9)])
def test_nobody_is_refused_by_a_guess(farm: Farm, seconds: float, ends: float) -> None:
    """A farm that was hardly busy, or saw hardly an end and not for long, has no rate yet."""
    busy(farm, seconds, ends)
    rids = {farm.put(f"a{index}", max_queue_wait_ms=2000).rid for index in range(20)}
    assert len(rids) == 20


def test_a_busy_farm_that_ends_nothing_is_believed_in_the_end(farm: Farm) -> None:
    """After ten times the limit without an end the next one is taken to be due: one may wait, more are too many."""
    busy(farm, seconds=21, ends=0)
    farm.put("a", max_queue_wait_ms=2000)
    with pytest.raises(QueueFull):
        farm.put("b", max_queue_wait_ms=2000)


def test_the_rate_is_taken_only_while_something_waits(farm: Farm) -> None:
    """Requests that end on a farm without a queue say nothing of how fast a queue drains."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    farm.emit(lease, Emission("a", 1, [last(1)], "finished"))
    assert farm.client.hmget(farm.keys.load, "busy_since", "busy_ends") == [None, None]
    for rid in ("b", "c", "d"):
        farm.put(rid)
    farm.claim(lease, requests_=1)
    farm.emit(lease, Emission("b", 1, [last(1)], "finished"))
    farm.client.hincrby(farm.keys.load, "busy_since", -300)
    farm.claim(lease, requests_=1)
    assert float(farm.client.hget(farm.keys.load, "busy_ends") or 0) == pytest.approx(1, abs=0.05)
    assert 250 < float(farm.client.hget(farm.keys.load, "busy_ms") or 0) < 5000
    farm.claim(lease)
    assert farm.client.hget(farm.keys.load, "busy_since") is None


def test_a_burst_on_a_farm_with_room_is_not_judged_by_an_old_rate(farm: Farm) -> None:
    """Where the last claim left nothing waiting there is room, however slow the farm was before."""
    busy(farm, seconds=100, ends=10)
    farm.client.hdel(farm.keys.load, "busy_since")
    rids = {farm.put(f"a{index}", max_queue_wait_ms=1000).rid for index in range(20)}
    assert len(rids) == 20


def test_only_the_last_ends_count(farm: Farm) -> None:
    """A rate of long ago is forgotten after some ends, fast or slow."""
    busy(farm, seconds=1000, ends=16)
    lease = farm.lead()
    farm.client.pexpire(lease.keys.lock, 60_000)
    for index in range(49):
        farm.put(f"a{index}")
    for index in range(48):
        farm.claim(lease, requests_=1)
        farm.emit(lease, Emission(f"a{index}", 1, [last(1)], "finished"))
    farm.client.hset(farm.keys.load, "busy_since", 1)
    farm.claim(lease, requests_=0)
    assert 15 < float(farm.client.hget(farm.keys.load, "busy_ends") or 0) <= 16
    assert float(farm.client.hget(farm.keys.load, "busy_ms") or 0) < 60_000
