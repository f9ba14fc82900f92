"""What Redis has lost is brought back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from api.generation.follow import BUFFER_ENTRIES, Feed, bring_back, origin_of
from control.messages import GenerationRequest, LogEntry, Sampling, encode
from control.redis.connection import Call
from control.requests import Enqueue, Followed, enqueue

DEADLINE, LOST = 7, 19
"""Where enqueue's arguments hold them."""
PARAMS = GenerationRequest(prompt=[1, 2], sampling=Sampling(max_tokens=1, seed="18446744073709551615"))
BEGUN = Enqueue(
    rid="a",
    model="m",
    params=PARAMS,
    tenant="t",
    priority="high",
    deadline_ms=60_000,
    on_disconnect="30",
    api="dead",
    idempotency_key="k#1",
    body_hash="hash",
    view='{"created":1}',
    received_ms=1_000_000,
)


def feed_of(origin: Enqueue | None) -> Feed:
    feed = Feed("m", "a", "t", asyncio.Event(), 0.0)
    feed.begin(origin)
    return feed


def enqueued_again(feed: Feed, now: int) -> Call[Any]:
    """The only call of what brings a request back of which nothing was delivered."""
    steps = bring_back(feed, now)
    assert steps is not None
    call = next(steps)
    assert call is not None
    return call


def followed(state: str = "running", deadline: int = 0, now: int = 0) -> Followed:
    """The fields that a follower reads of BEGUN; the times are by the server's clock."""
    fields = {
        "state": state,
        "seq": "1",
        "tenant": "t",
        "priority": "high",
        "deadline": str(deadline),
        "on_disconnect": "30",
        "idempotency": "k#1",
        "body_hash": "hash",
        "view": '{"created":1}',
        "t_received": "1000000",
    }
    return Followed(fields, [], False, encode(PARAMS).decode() if state == "running" else "", now)


def test_what_was_accepted_is_not_refused_when_it_comes_back() -> None:
    """However much comes back at once, no bound of the queue applies."""
    call = enqueued_again(feed_of(BEGUN), 0)
    assert (enqueue(BEGUN).args[LOST], call.args[LOST]) == (0, 1)


def test_a_follower_enqueues_what_the_first_process_did() -> None:
    """But for its own id, and the deadline of which only the rest is left, it is the same request."""
    learned = origin_of(feed_of(None), followed(deadline=90_000, now=50_000), "mine", now_ms=1_020_000)
    assert learned is not None and learned == msgspec.structs.replace(BEGUN, api="mine")
    assert enqueue(learned).args[DEADLINE] == 60_000


def test_the_rest_of_a_deadline_depends_on_no_other_process_s_clock() -> None:
    """Whatever the clock of who received it showed, what is left counts by the server's clock, then by our own."""
    for ours in (1_000, 1_000_000, 9_000_000, 960_000):  # the last one would make the sum 0, which means no deadline
        feed = feed_of(None)
        feed.begin(origin_of(feed, followed(deadline=90_000, now=50_000), "mine", now_ms=ours))
        call = enqueued_again(feed, ours + 15_000)
        assert abs(call.args[DEADLINE] - 25_000) <= 1
        late = enqueued_again(feed, ours + 50_000)
        assert late.args[DEADLINE] == 1


def test_an_ended_request_can_not_be_brought_back() -> None:
    """Its prompt is gone from Redis, so its log is taken whole while it is there."""
    feed = feed_of(None)
    ended = followed("finished")
    assert origin_of(feed, ended, "mine", 0) is None and bring_back(feed, 0) is None
    length = 3 * BUFFER_ENTRIES
    feed.fields = ended.fields | {"seq": str(length)}
    assert not feed.complete
    feed.offer([LogEntry(seq, 0, seq) for seq in range(1, length + 1)], 0.0, rest=True, whole=True)
    assert feed.complete and not feed.behind
    assert [entry.seq for entry in feed.take()] == list(range(1, length + 1))
