"""Bringing back what Redis has lost."""

from __future__ import annotations

import asyncio

from api.feed import Feed
from api.recovery import bring_back
from control.connection import Call
from control.messages import GenerationRequest, Sampling
from control.requests import Enqueue, enqueue

BOUNDS = slice(15, 18)
"""Where enqueue's arguments hold the bounds: requests, tokens, wait."""


def feed_of(origin: Enqueue | None) -> Feed:
    feed = Feed("m", "a", "t", asyncio.Event(), 0.0)
    feed.origin = origin
    return feed


def test_what_was_accepted_is_not_refused_when_it_comes_back() -> None:
    """However much comes back at once, no bound of the queue applies."""
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=1, seed="7"))
    bounds = {"max_queued_requests": 1, "max_queued_tokens": 2, "max_queue_wait_ms": 3}
    origin = Enqueue(rid="a", model="m", params=params, tenant="t", **bounds)
    call = bring_back(feed_of(origin), 0)
    assert isinstance(call, Call)
    assert enqueue(origin).args[BOUNDS] == (1, 2, 3)
    requests, tokens, wait = call.args[BOUNDS]
    assert min(requests, tokens) > 10**12 and wait == 0


def test_only_who_enqueued_it_can_bring_it_back() -> None:
    """A process that merely follows does not know the prompt."""
    assert bring_back(feed_of(None), 0) is None
