"""Lost events are read from the log: without a log there is a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from api.generation.follow import BUFFER_ENTRIES, Feed, Follower
from api.settings import ApiSettings
from control import requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, LogEntry, Sampling
from control.redis.connection import Batches, arun, connect_async
from control.replicas.lease import acquire
from tests.leader import ScriptedLeader
from tests.servers import Server

SETTINGS = ApiSettings(redis_url="", api_id="deaf", silence=0.1)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Any]:
    client = connect_async(server.url)
    yield client
    await client.aclose()


async def unheard(client: Any, follower: Follower, leader: ScriptedLeader, rid: str, max_tokens: int = 100) -> Feed:
    """A feed of a finished request none of whose events was published to this follower."""
    feed = follower.open("tiny", rid, "t", asyncio.Event())
    tokens = leader.tokenizer.encode(": hi").ids
    sampling = Sampling(max_tokens=max_tokens, stop_ids=leader.assets.eos_ids)
    params = GenerationRequest(prompt=tokens, sampling=sampling)
    await arun(client, requests.enqueue(requests.Enqueue(rid=rid, model="tiny", params=params, tenant="t")))
    feed.begin()
    async with asyncio.timeout(40):
        while await client.hget(ModelKeys("tiny").request(rid), "state") != "finished":
            await asyncio.sleep(0.005)
    return feed


async def test_silence_is_repaired_from_the_log(client: Any, leader: ScriptedLeader) -> None:
    """With not one event heard, the reader has every entry, in order."""
    follower = Follower(client, Batches(client), SETTINGS)
    follower.start()
    feed = await unheard(client, follower, leader, "repaired")
    got: list[LogEntry] = []
    async with asyncio.timeout(40):
        while not got or got[-1].finish is None:
            await feed.wake.wait()
            feed.wake.clear()
            got += feed.take()
    assert [entry.seq for entry in got] == list(range(1, len("you said hi") + 2))
    await follower.stop()


async def test_without_the_log_nothing_comes(client: Any, leader: ScriptedLeader) -> None:
    """The control: a follower whose log reading is off has nothing of the same request, although it has ended."""
    follower = Follower(client, Batches(client), SETTINGS)
    feed = await unheard(client, follower, leader, "unrepaired")
    assert feed.take() == [] and not feed.wake.is_set()
    await follower.refresh([feed])
    assert len(feed.take()) == len("you said hi") + 1


async def test_another_tenant_sees_nothing(client: Any, leader: ScriptedLeader) -> None:
    """A feed opened for another tenant fails at its first read."""
    follower = Follower(client, Batches(client), SETTINGS)
    await unheard(client, follower, leader, "secret")
    stranger = follower.open("tiny", "secret", "somebody else", asyncio.Event())
    await follower.refresh([stranger])
    assert isinstance(stranger.error, Exception) and stranger.take() == []


async def emitted(client: Any, rid: str) -> tuple[ModelKeys, list[LogEntry]]:
    """A running request of a model without a leader, with three tokens in its log."""
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9))
    lease = await arun(client, acquire("rolled", "r0", rid, 1))
    assert lease is not None
    await arun(client, requests.enqueue(requests.Enqueue(rid=rid, model="rolled", params=params, tenant="t")))
    await arun(client, requests.claim(lease, 9, 99))
    entries = [LogEntry(seq, 0, 40 + seq) for seq in (1, 2, 3)]
    await arun(client, requests.emit(lease, [requests.Emission(rid, 1, entries)]))
    await client.delete(lease.keys.lock)
    return lease.model_keys, entries


@pytest.mark.parametrize("quiet_reads", [0, 1], ids=["with its state", "the log alone"])
async def test_a_log_that_was_set_back_is_given_back(client: Any, quiet_reads: int) -> None:
    """Whichever way the follower reads, it notices that Redis has less than was given, and writes it back."""
    keys, entries = await emitted(client, f"back{quiet_reads}")
    rid = f"back{quiet_reads}"
    follower = Follower(client, Batches(client), SETTINGS)
    feed = follower.open("rolled", rid, "t", asyncio.Event())
    await follower.refresh([feed])
    assert feed.take() == entries
    await client.delete(keys.log(rid))
    await client.xadd(keys.log(rid), {"e": "[1,0,41]"}, id="1-0")
    await client.hset(keys.request(rid), "seq", 1)
    feed.quiet_reads = quiet_reads
    follower.start()
    async with asyncio.timeout(40):
        while await arun(client, requests.read_log("rolled", rid, 0)) != entries:
            await asyncio.sleep(0.005)
    assert await client.hget(keys.request(rid), "seq") == "3"
    assert feed.take() == [] and feed.error is None
    await follower.stop()


async def test_the_log_of_an_ended_request_outlives_redis(client: Any, leader: ScriptedLeader) -> None:
    """A process that never knew the prompt has taken all entries, and delivers them when nothing is left to read."""
    leader.reply = lambda _: "x" * 3 * BUFFER_ENTRIES
    follower = Follower(client, Batches(client), SETTINGS)
    await unheard(client, follower, leader, "ended", max_tokens=9999)
    feed = follower.open("tiny", "ended", "t", asyncio.Event())
    await follower.meet([feed])
    await client.delete(ModelKeys("tiny").request("ended"), ModelKeys("tiny").log("ended"))
    await follower.refresh([feed])
    got = feed.take()
    assert feed.error is None and got[-1].finish == "stop"
    assert [entry.seq for entry in got] == list(range(1, 3 * BUFFER_ENTRIES + 2))


async def test_what_is_not_enqueued_yet_is_not_missing(client: Any, leader: ScriptedLeader) -> None:
    """A look at the logs between a feed's opening and its enqueue does not tell its reader that it never was."""
    follower = Follower(client, Batches(client), SETTINGS)
    done = await unheard(client, follower, leader, "done")
    early = follower.open("tiny", "early", "t", asyncio.Event())
    early.offer([LogEntry(2, 0, 1)], 0.0)  # something makes it ask for the log
    follower.start()
    async with asyncio.timeout(10):
        await done.wake.wait()
    assert early.error is None and not early.begun
    await follower.stop()
