"""Many coroutines' calls share round trips to Redis: in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from control.errors import RedisUnavailable, RequestNotFound
from control.keys import ModelKeys
from control.redis.connection import Batches, Call, connect_async, read
from control.requests import follow
from tests.integration.api.conftest import ApiProcess
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server

AT_ONCE, CLIENTS = 1000, 150
"""Both are more connections than redis-py's pool holds."""


def append(value: int) -> Call[int]:
    return read("RPUSH", "seen", value, parse=int)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Any]:
    client = connect_async(server.url)
    yield client
    await client.delete("seen")
    await client.aclose()


async def test_a_thousand_calls_at_one_moment_share_a_connection_and_keep_their_order(client: Any) -> None:
    """Each has its own answer, and the server saw one client."""
    batches = Batches(client)
    lengths = await asyncio.gather(*(batches.run("m", append(value)) for value in range(AT_ONCE)))
    assert lengths == list(range(1, AT_ONCE + 1))
    assert await client.lrange("seen", 0, -1) == [str(value) for value in range(AT_ONCE)]
    assert len(client.connection_pool._available_connections) == 1


async def test_the_same_without_batches_is_refused(client: Any) -> None:
    """The control: a connection for each is more than there are."""
    outcomes = await asyncio.gather(*(client.rpush("seen", value) for value in range(AT_ONCE)), return_exceptions=True)
    assert any("Too many connections" in str(outcome) for outcome in outcomes)


async def test_a_call_that_is_not_needed_any_more_is_not_sent(client: Any) -> None:
    """The check runs just before the call is sent, and its error is the caller's alone."""
    batches, needed = Batches(client), True

    def check() -> None:
        if not needed:
            raise RequestNotFound("nobody waits")

    first = asyncio.ensure_future(batches.run("m", append(1), check))
    await asyncio.sleep(0)
    second, third = (asyncio.ensure_future(batches.run("m", append(value), check)) for value in (2, 3))
    fourth = asyncio.ensure_future(batches.run("m", append(4)))
    needed = False
    outcomes = await asyncio.gather(first, second, third, fourth, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes[1:3]] == ["nobody waits"] * 2
    assert "4" in await client.lrange("seen", 0, -1) and "2" not in await client.lrange("seen", 0, -1)


async def test_one_calls_error_is_its_own(client: Any) -> None:
    """Neighbours in the same round trip get their answers."""
    batches = Batches(client)
    absent, present = await asyncio.gather(
        batches.run("m", follow("m", "nobody", "", "t", 0)), batches.run("m", append(1)), return_exceptions=True
    )
    assert isinstance(absent, RequestNotFound)
    assert present == 1


async def test_what_nobody_waits_for_any_more_is_not_sent(client: Any) -> None:
    """A call that is cancelled before its round trip leaves no trace, and holds up nobody."""
    batches = Batches(client)
    given_up = asyncio.ensure_future(batches.run("m", append(1)))
    task = asyncio.ensure_future(batches.run("m", append(2)))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await task == 1
    assert await client.lrange("seen", 0, -1) == ["2"]


async def test_every_caller_hears_that_redis_is_away() -> None:
    """The failure of a round trip is the answer of each of its calls, and the lane goes on afterwards."""
    client = connect_async("redis://127.0.0.1:1/0")
    batches = Batches(client)
    for _ in range(2):
        outcomes = await batches.run_all("m", [append(1), append(2)])
        assert [type(outcome) for outcome in outcomes] == [RedisUnavailable, RedisUnavailable]
    await client.aclose()


async def test_more_clients_than_connections_may_come_and_leave_at_once(
    api: ApiProcess, leader: ScriptedLeader, redis_client: Any
) -> None:
    """No client is told that Redis is away, and no request of a client that has gone runs on."""
    leader.pause()
    async with httpx.AsyncClient(base_url=api.url, timeout=40, limits=httpx.Limits()) as http, asyncio.timeout(40):
        tasks = [asyncio.create_task(http.post("/v1/chat/completions", json=chat("x"))) for _ in range(CLIENTS)]
        while len(leader.claimed) < CLIENTS:
            assert not any(task.done() for task in tasks), "a client was refused"
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        requests = ModelKeys("tiny")
        for claimed in leader.claimed:
            while await asyncio.to_thread(redis_client.hget, requests.request(claimed.rid), "cancel") != "1":
                await asyncio.sleep(0.01)
    leader.resume()
