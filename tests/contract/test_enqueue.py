"""How requests enter the queue."""

from __future__ import annotations

import msgspec
import pytest

from control import requests
from control.errors import IdempotencyConflict, QueueFull, RequestError
from control.messages import GenerationRequest, Sampling
from control.redis.connection import run_steps
from control.requests import Emission, Enqueue
from tests.contract.conftest import MODEL, Farm, last, rids, token


def test_a_request_waits_with_all_that_a_leader_needs(farm: Farm) -> None:
    """The claimed request is the enqueued one, with a seed drawn as text."""
    assert farm.put("a", prompt=4, n=2).position == 1
    claimed = farm.claim(farm.lead()).requests[0]
    assert farm.params(claimed.rid).prompt == [0, 1, 2, 3]
    assert farm.params(claimed.rid).sampling.n == 2
    assert 0 <= int(farm.params(claimed.rid).sampling.seed) < 2**64
    assert (claimed.attempts, farm.log(claimed.rid), claimed.tenant) == (1, [], "t")
    assert farm.field("a", "state") == "running"


def test_a_seed_of_64_bits_survives(farm: Farm) -> None:
    """No digit of a seed is lost on its way through Lua's doubles."""
    seed = str(2**64 - 3)
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=1, seed=seed))
    farm.run(requests.enqueue(Enqueue(rid="a", model=MODEL, params=params, tenant="t")))
    assert farm.params("a").sampling.seed == seed
    assert farm.field("a", "seed") == seed


def test_the_same_key_and_body_join_the_running_request(farm: Farm) -> None:
    """A retry with its Idempotency-Key gets the first request's id, and follows it."""
    first = farm.put("a", idempotency_key="k", body_hash="h", api="api1")
    again = farm.put("b", idempotency_key="k", body_hash="h", api="api2")
    assert (first.rid, first.joined) == ("a", False)
    assert (again.rid, again.joined) == ("a", True)
    assert farm.field("a", "followers") == "api1 api2"
    assert farm.load("queued") == 1


def test_the_same_key_with_another_body_is_a_conflict(farm: Farm) -> None:
    """An Idempotency-Key means one body."""
    farm.put("a", idempotency_key="k", body_hash="h")
    with pytest.raises(IdempotencyConflict):
        farm.put("b", idempotency_key="k", body_hash="other")


def test_a_key_is_its_tenants_own(farm: Farm) -> None:
    """Another tenant's equal key joins nothing."""
    farm.put("a", tenant="one", idempotency_key="k", body_hash="h")
    assert farm.put("b", tenant="two", idempotency_key="k", body_hash="h").rid == "b"


def test_enqueueing_twice_after_a_lost_reply_is_one_request(farm: Farm) -> None:
    """The same call again changes nothing and answers the same."""
    params = GenerationRequest(prompt=[1, 2], sampling=Sampling(max_tokens=1))
    call = requests.enqueue(Enqueue(rid="a", model=MODEL, params=params, tenant="t"))
    assert farm.run(call) == farm.run(call)
    assert (farm.load("queued"), farm.load("queued_tokens")) == (1, 2)


def test_the_queue_is_bounded_in_requests(farm: Farm) -> None:
    """The request over the bound is refused with a time to come back."""
    farm.put("a", max_queued_requests=1)
    with pytest.raises(QueueFull) as full:
        farm.put("b", max_queued_requests=1)
    assert full.value.queued == 1
    assert 1 <= full.value.retry_after <= 60
    assert farm.field("b", "state") is None


def test_the_queue_is_bounded_in_tokens(farm: Farm) -> None:
    """A large prompt is refused where a small one still fits; alone it may wait."""
    farm.put("a", prompt=80, max_queued_tokens=50)
    with pytest.raises(QueueFull):
        farm.put("b", prompt=30, max_queued_tokens=100)
    assert farm.put("c", prompt=10, max_queued_tokens=100).position == 2


def test_retry_after_follows_the_drain_rate(farm: Farm) -> None:
    """A queue that drains faster asks for less patience."""
    waits: list[float] = []
    for rate in ("0.1", "0.5"):
        farm.client.hset(farm.keys.load, mapping={"queued": 20, "rate": rate})
        with pytest.raises(QueueFull) as full:
            farm.put("b", max_queued_requests=10)
        waits.append(full.value.retry_after)
    assert waits == [60.0, 40.0]


def test_one_tenant_can_not_shut_the_others_out(farm: Farm) -> None:
    """Where the queue is full, who has less than an equal share of it still gets in, up to twice the bound."""
    for index in range(4):
        farm.put(f"a{index}", tenant="a", max_queued_requests=4)
    with pytest.raises(QueueFull, match="as many requests as it may"):
        farm.put("a4", tenant="a", max_queued_requests=4)
    farm.put("b0", tenant="b", max_queued_requests=4)
    farm.put("b1", tenant="b", max_queued_requests=4)
    with pytest.raises(QueueFull):
        farm.put("b2", tenant="b", max_queued_requests=4)
    farm.put("c0", tenant="c", max_queued_requests=4)
    farm.put("d0", tenant="d", max_queued_requests=4)
    with pytest.raises(QueueFull):
        farm.put("e0", tenant="e", max_queued_requests=4)
    assert farm.load("queued") == 8


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
    for index in range(20):
        farm.put(f"a{index}", max_queue_wait_ms=2000)


def test_a_busy_farm_that_ends_nothing_is_believed_in_the_end(farm: Farm) -> None:
    """After ten times the limit without an end the next one is taken to be due: one may wait, more are too many."""
    busy(farm, seconds=21, ends=0)
    farm.put("a", max_queue_wait_ms=2000)
    with pytest.raises(QueueFull):
        farm.put("b", max_queue_wait_ms=2000)


def test_the_rate_is_taken_only_while_something_waits(farm: Farm) -> None:
    """What ends on a farm without a queue says nothing of how fast a queue drains."""
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
    for index in range(20):
        farm.put(f"a{index}", max_queue_wait_ms=1000)


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


def test_a_claim_makes_room(farm: Farm) -> None:
    """What was claimed does not count as queued, and positions move up."""
    farm.put("a")
    farm.put("b")
    assert farm.run(requests.position(MODEL, "b")) == 2
    farm.claim(farm.lead(), requests_=1)
    assert farm.run(requests.position(MODEL, "b")) == 1
    assert farm.run(requests.position(MODEL, "a")) is None
    assert (farm.load("queued"), farm.load("queued_tokens")) == (1, 3)


def test_a_request_that_comes_back_after_a_loss_brings_its_log(farm: Farm) -> None:
    """The delivered prefix is the log, and the leader that claims it gets it."""
    farm.put("a", delivered=[token(1, 40), token(2, 41)])
    assert [entry.token for entry in farm.look("a").entries] == [40, 41]
    assert [claimed.seq for claimed in farm.claim(farm.lead()).requests] == [2]
    assert [entry.token for entry in farm.log("a")] == [40, 41]
    assert farm.completion_tokens("a") == 2


def test_what_does_not_begin_at_the_first_entry_is_no_log(farm: Farm) -> None:
    """Nothing is queued with a log that has a gap."""
    for delivered in ([token(2)], [token(1), token(3)]):
        with pytest.raises(RequestError, match="without a gap"):
            farm.put("a", delivered=delivered)
    assert farm.load("queued") == 0 and farm.client.exists(farm.keys.log("a")) == 0


def test_two_apis_bring_back_one_request_and_the_longer_prefix_wins(farm: Farm) -> None:
    """The second re-enqueue changes nothing; the repair that follows it adds what the first one lacked."""
    longer = [token(1, 40), token(2, 41)]
    farm.put("a", api="api1", delivered=longer[:1])
    farm.put("a", api="api2", delivered=longer)
    assert [entry.token for entry in farm.look("a").entries] == [40]
    assert run_steps(farm.client, requests.repair(MODEL, "a", "api2", "t", longer)) == "appended"
    assert [entry.token for entry in farm.look("a").entries] == [40, 41]
    assert farm.field("a", "seq") == "2"
    assert farm.load("queued") == 1


def test_what_was_lost_comes_back_past_every_bound(farm: Farm) -> None:
    """It was accepted once; a new request of the same size is refused."""
    farm.put("a")
    full = {"max_queued_requests": 0, "max_queued_tokens": 1, "max_queue_wait_ms": 1}
    with pytest.raises(QueueFull):
        farm.put("b", **full)
    assert farm.put("b", lost=True, **full).rid == "b"
    assert farm.load("queued") == 2


@pytest.mark.parametrize("body_hash", ["h", "other"])
def test_what_was_lost_comes_back_under_its_own_id(farm: Farm, body_hash: str) -> None:
    """A request that took its key meanwhile keeps the key, and does not swallow the one that somebody reads."""
    farm.put("new", idempotency_key="k", body_hash="h")
    back = farm.put("old", idempotency_key="k", body_hash=body_hash, lost=True, delivered=[token(1, 40)])
    assert (back.rid, back.joined) == ("old", False)
    assert [entry.token for entry in farm.look("old").entries] == [40]
    assert farm.put("again", idempotency_key="k", body_hash="h").rid == "new"
    assert farm.field("old", "idempotency") == ""


def test_a_key_comes_back_with_its_request(farm: Farm) -> None:
    """A retry after a total loss joins what was brought back, and another body is a conflict again."""
    farm.put("a", idempotency_key="k", body_hash="h", lost=True)
    assert farm.put("b", idempotency_key="k", body_hash="h").rid == "a"
    with pytest.raises(IdempotencyConflict):
        farm.put("c", idempotency_key="k", body_hash="other")


@pytest.mark.parametrize(
    "wrong",
    [{"rid": "a b"}, {"api": "x y"}, {"priority": "urgent"}, {"on_disconnect": "-1"}],
)
def test_what_can_not_be_carried_is_refused_by_name(farm: Farm, wrong: dict[str, object]) -> None:
    """Ids with spaces, unknown classes and policies, and a prefix with a gap never reach Redis."""
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=1))
    request = msgspec.structs.replace(Enqueue(rid="a", model=MODEL, params=params, tenant="t"), **wrong)
    with pytest.raises(RequestError):
        requests.enqueue(request)


def test_enqueue_rings_the_bell(farm: Farm) -> None:
    """A leader that waits from the id of its last claim hears the next request."""
    lease = farm.lead()
    bell = farm.claim(lease).bell
    farm.put("a")
    assert len(farm.client.xread({farm.keys.bell: bell})[0][1]) == 1
    assert rids(farm.claim(lease)) == ["a"]
