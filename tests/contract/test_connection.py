"""Clients wait for a server that is absent, late, locked or unfit: real servers."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from control import requests
from control.errors import RedisFull, RedisUnavailable, RequestNotFound, SettingsError
from control.messages import GenerationRequest, Sampling
from control.redis.connection import (
    arun,
    arun_all,
    connect,
    connect_async,
    connect_blocking,
    read_streams,
    run,
    run_all,
)
from control.redis.servers import wait_until_ready
from control.replicas.lease import acquire, holder
from control.requests import Enqueue
from tests.servers import NEW, OLD, Server, serving


def nothing_said(line: str) -> None:
    raise AssertionError(f"unexpected: {line}")


@pytest.mark.parametrize("binary", [OLD, NEW], ids=["old", "new"])
def test_a_ready_server_is_ready_at_once(binary: Path) -> None:
    """Versions from 6.2 on are fit, without a word."""
    with serving(binary) as server, closing(connect(server.url)) as client:
        wait_until_ready(client, 5, nothing_said)


def test_an_absent_server_is_waited_for_aloud(tmp_path: Path) -> None:
    """The wait is visible, ends, and names the server and the remedy."""
    said: list[str] = []
    client = connect(f"unix://:secret@{tmp_path}/redis.sock")
    with closing(client), pytest.raises(RedisUnavailable, match="REDIS_URL or --redis") as absent:
        wait_until_ready(client, 0.3, said.append)
    assert str(tmp_path) in str(absent.value)
    assert len(said) == 1
    assert str(tmp_path) in said[0]
    assert "secret" not in str(absent.value) + said[0]


def test_a_server_that_comes_late_is_found() -> None:
    """Waiting ends when the server answers."""
    with serving(NEW) as server:
        server.stop()
        starter = threading.Thread(target=server.start)
        with closing(connect(server.url)) as client:
            wait_until_ready(client, 10, lambda _: starter.start())
            assert client.ping()
        starter.join()


def test_a_wrong_password_fails_at_once() -> None:
    """It is told apart from an absent server, and no password is shown."""
    with serving(NEW, password="right") as server:
        for url in (server.url.replace("right", "wrong"), server.url.replace(":right@", "")):
            with closing(connect(url)) as client:
                with pytest.raises(RedisUnavailable, match="refused the password") as refused:
                    wait_until_ready(client, 60, nothing_said)
                with pytest.raises(RedisUnavailable, match="refused the password"):
                    run(client, holder("m", "r0"))
            assert "wrong" not in str(refused.value)


def test_a_database_that_is_not_there_fails_at_once() -> None:
    """The server's own words and the remedy, not a traceback."""
    with (
        serving(NEW) as server,
        closing(connect(f"{server.url}?db=99")) as client,
        pytest.raises(SettingsError, match=r"DB index is out of range.*number of the database"),
    ):
        wait_until_ready(client, 60, nothing_said)


def test_a_server_that_evicts_is_refused() -> None:
    """A queue must not be thrown away for memory; the remedy is named."""
    options = ("maxmemory 100mb", "maxmemory-policy allkeys-lru")
    with serving(NEW, *options) as server, closing(connect(server.url)) as client:
        refused = pytest.raises(SettingsError, match="Set `maxmemory-policy noeviction`")
        with refused:
            wait_until_ready(client, 5, nothing_said)


def test_an_eviction_policy_without_a_limit_is_only_mentioned() -> None:
    """Nothing is evicted while maxmemory is not set."""
    said: list[str] = []
    with serving(OLD, "maxmemory-policy volatile-ttl") as server, closing(connect(server.url)) as client:
        wait_until_ready(client, 5, said.append)
    assert ["noeviction" in line for line in said] == [True]


def test_a_call_survives_a_restart_of_the_server() -> None:
    """A connection that broke is made anew within the call."""
    with serving(NEW, "appendonly yes", "appendfsync always") as server, closing(connect(server.url)) as client:
        lease = run(client, acquire("m", "r0", "one", 1))
        server.kill()
        server.start()
        assert lease is not None
        assert run(client, holder("m", "r0")) in (lease.token, None)  # None where the restart took two seconds


def test_an_acknowledged_request_survives_kill_9_of_the_server() -> None:
    """An append-only file that is written before the answer loses nothing; `everysec` may put that off for 2 s."""
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=1))
    calls = [requests.enqueue(Enqueue(rid=f"r{i}", model="m", params=params, tenant="t")) for i in range(50)]
    options = ("appendonly yes", "appendfsync always")
    with serving(NEW, *options) as server, closing(connect(server.url)) as client:
        run_all(client, calls)
        server.kill()
        server.start()
        lease = run(client, acquire("m", "r0", "one", 1))
        assert lease is not None
        claimed, more = list[requests.Claimed](), True
        while more:
            claims = run(client, requests.claim(lease, 100, 1000))
            claimed, more = claimed + claims.requests, claims.more
    assert [request.rid for request in claimed] == [f"r{i}" for i in range(50)]


def test_a_dead_server_is_unavailable(tmp_path: Path) -> None:
    """After a few quick tries a call gives up; a blocking read does too."""
    url = f"unix://{tmp_path}/redis.sock"
    with closing(connect(url)) as client, pytest.raises(RedisUnavailable, match="can't be reached"):
        run(client, holder("m", "r0"))
    with closing(connect_blocking(url)) as client, pytest.raises(RedisUnavailable, match="can't be reached"):
        read_streams(client, {"s": "0"}, 10)


def test_a_server_out_of_memory_is_unavailable_not_wrong() -> None:
    """A write that is refused for memory is to be tried again later, and kills nobody."""
    params = GenerationRequest(prompt=list(range(3000)), sampling=Sampling(max_tokens=1))
    with serving(NEW) as server, closing(connect(server.url)) as client:
        client.config_set("maxmemory", "1")
        call = requests.enqueue(Enqueue(rid="a", model="m", params=params, tenant="t"))
        with pytest.raises(RedisFull, match="maxmemory"):
            run(client, call)
        client.config_set("maxmemory", "0")
        assert run(client, call).rid == "a"


async def test_asyncio_runs_the_same_calls(new_server: Server) -> None:
    """An asyncio client gets the same answers and the same errors, scripts sent again included."""
    client = connect_async(new_server.url)
    try:
        await client.flushall()
        await client.script_flush()
        lease = await arun(client, acquire("m", "r0", "one", 1))
        token, missing = await arun_all(client, [holder("m", "r0"), requests.follow("m", "x", "", "t", 0)])
        assert lease is not None
        assert token == lease.token
        assert isinstance(missing, RequestNotFound)
        params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=1))
        await arun(client, requests.enqueue(Enqueue(rid="a", model="m", params=params, tenant="t")))
        assert await arun(client, requests.read_log("m", "a", 0)) == []
    finally:
        await client.aclose()


async def test_asyncio_knows_an_absent_server(tmp_path: Path) -> None:
    """The asyncio client gives up in the same way."""
    client = connect_async(f"unix://{tmp_path}/redis.sock")
    with pytest.raises(RedisUnavailable, match="can't be reached"):
        await arun(client, holder("m", "r0"))
    await client.aclose()
