"""Clients follow Sentinels and a Cluster to the right server: while they hold on to their URL."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import pytest
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from control import requests
from control.errors import RedisUnavailable, SettingsError
from control.keys import ModelKeys
from control.messages import GenerationRequest, Sampling
from control.redis.clients import AsyncRedis, connect, connect_async, connect_blocking
from control.redis.connection import Call, arun, read_streams, run, run_all, run_steps
from control.redis.servers import wait_until_ready
from control.replicas.lease import Lease, acquire, holder
from control.requests import Emission, Enqueue
from ops.chaos.system.servers import PASSWORD
from ops.chaos.system.topologies import ClusterTopology, SentinelTopology, cluster
from tests.contract.conftest import token
from tests.servers import NEW

T = TypeVar("T")
MODEL = "rolled"


def nothing_said(line: str) -> None:
    raise AssertionError(f"unexpected: {line}")


def sit_out(attempt: Callable[[], T], seconds: float = 40.0) -> T:
    """Retry a call while Redis is away, as every process of the farm does."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except RedisUnavailable:
            if time.monotonic() > deadline:
                raise


async def asit_out(client: AsyncRedis, call: Call[T]) -> T:
    """As `sit_out`, on an asyncio client."""
    async with asyncio.timeout(40):
        while True:
            with contextlib.suppress(RedisUnavailable):
                return await arun(client, call)


async def subscribed(pubsub: PubSub, channel: str) -> bool:
    """True if the node takes the subscription."""
    with contextlib.suppress(RedisError, OSError):
        await pubsub.subscribe(channel)
        return await pubsub.get_message(timeout=2) is not None
    await pubsub.aclose()
    return False


@pytest.fixture(scope="module")
def replicated() -> Iterator[ClusterTopology]:
    """Three shards with a replica each."""
    with cluster(replicas=1, binary=NEW) as topology:
        yield topology


def serve_one(url: str) -> Lease:
    """A leader with one request of one token."""
    with closing(connect(url)) as client:
        wait_until_ready(client, 10, nothing_said)
        lease = run(client, acquire(MODEL, "r0", "one", 1))
        assert lease is not None
        params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9))
        run(client, requests.enqueue(Enqueue(rid="a", model=MODEL, params=params, tenant="t")))
        run(client, requests.claim(lease, 9, 99))
        run(client, requests.emit(lease, [Emission("a", 1, [token(1, 41)])]))
        return lease


def roll_back_and_repair(url: str, lease: Lease, lag: Callable[[], None], fail_over: Callable[[], object]) -> None:
    """The newest tokens are lost with the primary; the same clients then find, repair and continue the log."""
    with closing(connect(url)) as client, closing(connect_blocking(url)) as blocking:
        read_streams(blocking, {lease.model_keys.bell: "0"}, 10)
        lag()
        emitted = run(client, requests.emit(lease, [Emission("a", 2, [token(2, 42), token(3, 43)])]))
        assert emitted.behind == {}
        fail_over()
        entries = [token(1, 41), token(2, 42), token(3, 43)]
        assert [entry.token for entry in sit_out(lambda: run(client, requests.read_log(MODEL, "a", 0)))] == [41]
        assert run_steps(client, requests.repair(MODEL, "a", "api1", "t", entries)) == "appended"
        assert run(client, requests.read_log(MODEL, "a", 0)) == entries
        assert sit_out(lambda: read_streams(blocking, {lease.model_keys.bell: "0"}, 10)) != {}


def test_a_sentinel_failover_rolls_back_and_is_repaired(sentinel_servers: SentinelTopology) -> None:
    """The replica that lacked the newest tokens leads, has no script, and the clients' URL still holds."""
    lease = serve_one(sentinel_servers.url)
    try:
        roll_back_and_repair(sentinel_servers.url, lease, sentinel_servers.lag, sentinel_servers.fail_over)
    finally:
        sentinel_servers.heal()


def test_a_cluster_failover_rolls_back_and_is_repaired(replicated: ClusterTopology) -> None:
    """As behind Sentinels, for the shard that has the model."""
    key = ModelKeys(MODEL).bell
    lease = serve_one(replicated.url)
    try:
        roll_back_and_repair(replicated.url, lease, lambda: replicated.lag(key), lambda: replicated.fail_over(key))
    finally:
        replicated.heal()


def test_one_shard_that_is_away_spares_the_others(replicated: ClusterTopology) -> None:
    """Its calls are RedisUnavailable, each in its place; the others' answers stand."""
    names = [f"m{i}" for i in range(12)]
    with closing(connect(replicated.url)) as client:
        leases = run_all(client, [acquire(name, "r0", "one", 1) for name in names])
        assert all(isinstance(lease, Lease) for lease in leases)
        lost = replicated.primary_of(ModelKeys("m0").bell)
        gone = {name for name in names if replicated.primary_of(ModelKeys(name).bell) is lost}
        lost.kill()
        try:
            outcomes = dict(zip(names, run_all(client, [holder(name, "r0") for name in names]), strict=True))
            assert 0 < len(gone) < len(names)
            assert all(isinstance(outcomes[name], str) for name in names if name not in gone)
            # Its replica may have been elected while the calls were tried again.
            assert all(isinstance(outcomes[name], (RedisUnavailable, str)) for name in gone)
            assert sit_out(lambda: run(client, holder("m0", "r0"))) in (leases[0].token, None)
        finally:
            replicated.heal()


async def test_asyncio_follows_a_cluster_failover(replicated: ClusterTopology) -> None:
    """The asyncio client finds the new primary, and a subscription can be made again on a node that lives."""
    client = connect_async(replicated.url)
    key = ModelKeys("async").bell
    try:
        lease = await arun(client, acquire("async", "r0", "one", 1))
        assert lease is not None
        pubsub = client.pubsub()
        await pubsub.subscribe("news")
        replicated.fail_over(key)
        assert await asit_out(client, holder("async", "r0")) in (lease.token, None)
        heard = client.pubsub()
        async with asyncio.timeout(40):
            while not await subscribed(heard, "news"):
                heard = client.pubsub()  # of the next node: one of them is dead
            publisher = replicated.primary_of(key)
            publisher.ask("PUBLISH", "news", "x")
            while (message := await heard.get_message(ignore_subscribe_messages=True, timeout=1)) is None:
                pass
        assert message["data"] == "x"
        await heard.aclose()
        await pubsub.aclose()
        assert await client.ping()
    finally:
        replicated.heal()
        await client.aclose()


def test_a_slot_that_moves_is_sat_out_and_followed(cluster_server: ClusterTopology) -> None:
    """While its keys are on their way calls are RedisUnavailable and change nothing; then the same client goes on."""
    keys = ModelKeys("moving")
    source = cluster_server.primary_of(keys.bell)
    target = next(node for node in cluster_server.nodes if node is not source)
    slot = source.ask("CLUSTER", "KEYSLOT", keys.bell)
    with closing(connect(cluster_server.url)) as client:
        client.flushall()
        lease = run(client, acquire("moving", "r0", "one", 1))
        assert lease is not None
        params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=9))
        run(client, requests.enqueue(Enqueue(rid="a", model="moving", params=params, tenant="t")))
        target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", source.ask("CLUSTER", "MYID"))
        source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", target.ask("CLUSTER", "MYID"))
        # The lock and the epoch stay behind, the queue is gone already.
        moved = [keys.queue("normal", "t"), keys.request("a")]
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 2000, "AUTH", PASSWORD, "KEYS", *moved)
        with pytest.raises(RedisUnavailable):
            run(client, requests.claim(lease, 9, 99))
        rest = source.ask("CLUSTER", "GETKEYSINSLOT", slot, 100)
        source.ask("MIGRATE", "127.0.0.1", target.port, "", 0, 2000, "AUTH", PASSWORD, "KEYS", *rest)
        for node in (target, source, *cluster_server.nodes):
            node.ask("CLUSTER", "SETSLOT", slot, "NODE", target.ask("CLUSTER", "MYID"))
        assert cluster_server.primary_of(keys.bell) is target
        lease = sit_out(lambda: run(client, acquire("moving", "r0", "two", 1))) or lease
        assert [one.rid for one in run(client, requests.claim(lease, 9, 99)).requests] == ["a"]


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_a_url_of_the_wrong_kind_is_told(
    kind: str, cluster_server: ClusterTopology, sentinel_servers: SentinelTopology
) -> None:
    """A node named as if it were the one server gets the form of URL that is meant."""
    node = cluster_server.nodes[0] if kind == "cluster" else sentinel_servers.sentinels[0]
    password = f":{PASSWORD}@" if kind == "cluster" else ""
    with (
        closing(connect(f"redis://{password}127.0.0.1:{node.port}/0")) as client,
        pytest.raises(SettingsError, match=rf"redis\+{kind}://"),
    ):
        wait_until_ready(client, 5, nothing_said)


def test_one_server_is_no_cluster(sentinel_servers: SentinelTopology) -> None:
    """Said at once, in the server's words."""
    url = f"redis+cluster://:{PASSWORD}@127.0.0.1:{sentinel_servers.primary.port}"
    with closing(connect(url)) as client, pytest.raises(SettingsError, match="not as its URL asks"):
        wait_until_ready(client, 5, nothing_said)


def test_an_unknown_primary_is_waited_for_and_named(sentinel_servers: SentinelTopology) -> None:
    """The Sentinels answer, but know no such name."""
    said: list[str] = []
    with (
        closing(connect(f"{sentinel_servers.url}-typo")) as client,
        pytest.raises(RedisUnavailable, match="farm-typo"),
    ):
        wait_until_ready(client, 0.3, said.append)
    assert said and PASSWORD not in said[0]
