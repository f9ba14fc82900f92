"""The lossy proxy of a chaos run, before a real server."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from control.errors import RedisUnavailable
from control.redis.connection import connect, connect_blocking, read_streams, run
from control.replicas.lease import acquire, holder
from ops.chaos.system.proxy import Proxy
from tests.servers import Server
from tests.waiting import until


@pytest.fixture
def proxy(new_server: Server) -> Iterator[Proxy]:
    with redis.Redis.from_url(new_server.url) as client:
        client.flushall()
    proxy = Proxy(new_server.socket)
    proxy.start()
    yield proxy
    proxy.stop()


@contextmanager
def bare(proxy: Proxy, seconds: float = 5.0) -> Iterator[redis.Redis]:
    """A client without any retry, so that each loss shows."""
    retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    with redis.Redis.from_url(proxy.url, retry=retry, socket_timeout=seconds, decode_responses=True) as client:
        yield client


def test_bytes_pass_unchanged(proxy: Proxy) -> None:
    """A value larger than any buffer on the way comes back as it was sent."""
    value = random.Random(1).randbytes(5_000_000).hex()
    with bare(proxy) as client:
        client.set("k", value)
        assert client.get("k") == value
    assert proxy.counts.cut == proxy.counts.delayed == 0


def test_cut_connections_are_reset_and_come_back(proxy: Proxy) -> None:
    """The proof is the number of open connections that were reset; a call of ours survives it."""
    with bare(proxy) as client, closing(connect(proxy.url)) as ours:
        client.ping()
        run(ours, holder("m", "r0"))
        assert proxy.cut() == proxy.counts.cut == proxy.counts.connections == 2
        assert run(ours, holder("m", "r0")) is None
    assert proxy.counts.connections == 3


def test_a_blocked_read_hears_of_a_cut(proxy: Proxy) -> None:
    """It is told apart from silence."""
    with closing(connect_blocking(proxy.url)) as client:
        client.ping()
        began = time.monotonic()
        proxy._loop.call_soon_threadsafe(proxy._loop.call_later, 0.1, lambda: [link.cut() for link in proxy._links])
        with pytest.raises(RedisUnavailable):
            read_streams(client, {"s": "0"}, 8_000)
        assert time.monotonic() - began < 5


def test_a_dropped_reply_was_executed(proxy: Proxy) -> None:
    """The script took effect, its answer never arrived, and the repeat says the same."""
    with closing(connect(proxy.url)) as ours:
        run(ours, acquire("m", "r0", "one", 1))  # the server knows the script from here on
        proxy.drop_replies(2)
        lease = run(ours, acquire("m", "r1", "one", 1))
        assert proxy.counts.dropped == 2
        assert lease is not None
        assert run(ours, holder("m", "r1")) == lease.token


def test_a_dropped_reply_without_a_repeat_is_lost(proxy: Proxy) -> None:
    """Control: without a retry the caller never learns what it did."""
    with bare(proxy) as client:
        client.eval("return 1", 0)
        proxy.drop_replies(1)
        with pytest.raises(redis.exceptions.ConnectionError):
            client.eval("return redis.call('SET', 'k', 'v')", 0)
        assert client.get("k") == "v"


def test_a_dropped_reply_may_be_mere_silence(proxy: Proxy) -> None:
    """Only the client's own time-out finds it."""
    with bare(proxy, seconds=0.2) as client:
        proxy.drop_replies(1, "silence")
        with pytest.raises(redis.exceptions.TimeoutError):
            client.eval("return redis.call('INCR', 'k')", 0)
        assert client.get("k") == "1"


def test_an_answer_that_ends_in_the_middle_is_sent_for_again(proxy: Proxy) -> None:
    """Half an answer is never taken for one."""
    with closing(connect(proxy.url)) as ours, bare(proxy) as client:
        proxy.split_replies(1)
        with pytest.raises(redis.exceptions.ConnectionError):
            client.eval("return {'a', 'b', 'c'}", 0)
        proxy.split_replies(1)
        assert run(ours, acquire("m", "r0", "one", 1)) is not None
    assert proxy.counts.split == 2


def test_delay_makes_every_answer_late_and_keeps_the_order(proxy: Proxy) -> None:
    """Late on the way there and on the way back, and prompt again afterwards."""
    with bare(proxy) as client:
        client.ping()
        proxy.delay(0.1)
        began = time.monotonic()
        assert client.pipeline(transaction=False).set("k", "1").incr("k").get("k").execute() == [True, 2, "2"]
        assert time.monotonic() - began >= 0.2
        assert proxy.counts.delayed >= 2
        proxy.heal()
        late = proxy.counts.delayed
        client.ping()
        assert proxy.counts.delayed == late


def test_a_black_hole_answers_nothing_and_resets_nothing(proxy: Proxy) -> None:
    """Open connections stay dead after it, new ones work."""
    with bare(proxy, seconds=0.2) as client, bare(proxy, seconds=0.2) as newcomer:
        client.ping()
        assert proxy.black_hole() == 1
        for lost in (client, newcomer):
            with pytest.raises(redis.exceptions.TimeoutError):
                lost.ping()
        assert proxy.counts.swallowed > 0
        proxy.heal()
        assert client.ping()
        assert newcomer.ping()


def test_a_client_that_gives_a_silent_connection_up_is_counted(proxy: Proxy) -> None:
    """It had sent its command before the silence, so that no further byte of it shows the fault."""
    with bare(proxy) as client, bare(proxy) as other:
        client.ping()
        assert proxy.black_hole(newcomers=False) == 1
        other.ping()
        client.close()
        assert until(lambda: proxy.counts.abandoned == 1)
        assert proxy.counts.swallowed == 0


def test_a_server_that_is_away_is_a_closed_door(tmp_path: Path) -> None:
    """The proxy answers with a reset, as a host without a server does."""
    proxy = Proxy(tmp_path / "redis.sock")
    proxy.start()
    try:
        with bare(proxy) as client, pytest.raises(redis.exceptions.ConnectionError):
            client.ping()
    finally:
        proxy.stop()
