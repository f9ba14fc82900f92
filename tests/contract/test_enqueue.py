"""How requests enter the queue."""

from __future__ import annotations

import msgspec
import pytest

from control import requests
from control.errors import IdempotencyConflict, QueueFull, RequestError
from control.messages import GenerationRequest, Sampling
from control.redis.connection import run_steps
from control.requests import Enqueue
from tests.contract.conftest import MODEL, Farm, rids, token


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


def test_a_claim_makes_room(farm: Farm) -> None:
    """A claimed request does not count as queued, and positions move up."""
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
