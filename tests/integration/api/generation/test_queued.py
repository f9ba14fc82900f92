"""Requests in the queue cost few calls; and whatever becomes of one is noticed without an event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.generation import follow
from api.generation.follow import Feed, Follower
from api.settings import ApiSettings
from control import requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, Sampling
from control.redis.connection import Batches, arun, arun_every, connect_async
from control.replicas.lease import acquire
from control.requests import Enqueue
from tests.servers import NEW, serving

WAITING, LOOKS = 300, 3
KEYS = ModelKeys("busy")


@pytest.fixture
async def client() -> AsyncIterator[Any]:
    """Of a server of its own, whose commands are counted."""
    with serving(NEW) as server:
        client = connect_async(server.url)
        yield client
        await client.aclose()


async def waiting(client: Any, follower: Follower, count: int) -> list[Feed]:
    """Feeds of requests that a process has enqueued and nobody claims."""
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9))
    enqueues = [Enqueue(rid=f"r{index}", model="busy", params=params, tenant="t", api="me") for index in range(count)]
    feeds = [follower.open("busy", enqueue.rid, "t", asyncio.Event()) for enqueue in enqueues]
    await arun_every(client, [requests.enqueue(enqueue) for enqueue in enqueues])
    for feed, enqueue in zip(feeds, enqueues, strict=True):
        feed.begin(enqueue)
    return feeds


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def calls(client: Any) -> int:
    """Commands that clients sent, without those inside scripts."""
    stats = await client.info("commandstats")
    sent = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_xrange")
    return sum(int(stats[name]["calls"]) for name in sent if name in stats)


@pytest.mark.parametrize("places", [256, 1], ids=["together", "control"])
async def test_requests_that_wait_are_looked_at_together(
    client: Any, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks at three hundred requests take a few calls, and a few hundred where each has its own."""
    monkeypatch.setattr(follow, "PLACES", places)
    monkeypatch.setattr(follow, "_QUEUED_TICK_S", 0.05)
    follower = Follower(client, Batches(client), ApiSettings(redis_url="", api_id="me", silence=0.1))
    feeds = await waiting(client, follower, WAITING)
    await client.config_resetstat()
    follower.start()
    await until(lambda: min(feed.looks for feed in feeds) >= LOOKS)
    sent, looks = await calls(client), sum(feed.looks for feed in feeds)
    await follower.stop()
    assert [feed.position for feed in feeds] == list(range(1, WAITING + 1))
    assert not any(feed.wake.is_set() for feed in feeds), "nobody asked to be told its place"
    assert sent < 4 * looks / WAITING if places > 1 else sent >= looks


async def test_what_became_of_one_is_noticed_among_many(client: Any) -> None:
    """Claimed, cancelled, no longer followed, lost: each without an event that this process hears."""
    follower = Follower(client, Batches(client), ApiSettings(redis_url="", api_id="me", silence=0.1))
    feeds = await waiting(client, follower, 40)
    follower.start()
    await until(lambda: all(feed.looks for feed in feeds))
    lease = await arun(client, acquire("busy", "r0", "one", 1))
    assert lease is not None
    await arun(client, requests.claim(lease, 1, 99))
    await arun(client, requests.cancel("busy", "r1", "t"))
    await client.hset(KEYS.request("r2"), "followers", "")
    await client.delete(KEYS.request("r3"))
    await until(lambda: feeds[0].fields.get("state") == "running" and feeds[0].position is None)
    await until(lambda: feeds[1].entries and feeds[1].entries[0].finish == "cancelled")
    async with asyncio.timeout(30):
        while await client.hget(KEYS.request("r2"), "followers") != "me":
            await asyncio.sleep(0.005)
        while await client.hget(KEYS.request("r3"), "state") != "queued":
            await asyncio.sleep(0.005)
    assert feeds[0].wake.is_set() and not feeds[0].queued and not feeds[1].queued
    assert all(feed.queued for feed in feeds[2:])
    await client.flushall()
    async with asyncio.timeout(30):
        while await client.exists(*(KEYS.request(feed.rid) for feed in feeds[2:])) < 38:
            await asyncio.sleep(0.005)
    for feed in feeds:
        follower.close(feed)
    assert follower.open_feeds == 0
    await follower.stop()
