"""A server at its maxmemory refuses new work alone: what was admitted goes on to its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from control import access, requests, scripts
from control.errors import RedisFull, RedisUnavailable
from control.records.responses import Quota, StoredResponse, end_response, keep_response, read_response
from control.redis.cluster import Cluster, servers_of
from control.redis.connection import write
from control.redis.servers import server_memory
from control.replicas.lease import acquire, release, renew
from control.requests import Emission
from tests.contract.conftest import MODEL, Farm, last, token


@contextmanager
def full(farm: Farm) -> Iterator[None]:
    """Every server of the farm is beyond its maxmemory."""
    servers = servers_of(farm.client)
    for server in servers:
        server.config_set("maxmemory", "1")
    try:
        yield
    finally:
        for server in servers:
            server.config_set("maxmemory", "0")


@pytest.fixture
def farm(farm: Farm) -> Farm:
    """The fake server counts no memory."""
    if farm.url is None:
        pytest.skip("the fake server has no maxmemory")
    return farm


QUOTA = Quota(10**6, 10)
STORED = StoredResponse(rid="s", owner="o", tenant="t", model=MODEL, view="{}", input=[])


def test_what_was_admitted_goes_on_to_its_end(farm: Farm) -> None:
    """Claims, tokens, ends, cancels, renewals, heartbeats, a change of leader: none needs room for something new."""
    lease = farm.lead()
    for rid in ("a", "b", "c", "d"):
        farm.put(rid)
    farm.run(keep_response(STORED, 60_000, QUOTA))
    with full(farm):
        claims = farm.claim(lease, requests_=3)
        assert [claimed.rid for claimed in claims.requests] == ["a", "b", "c"]
        farm.emit(lease, Emission("a", 1, [token(1), token(2)]), Emission("b", 1, [token(1)]))
        farm.emit(lease, Emission("a", 3, [last(3)], "finished"))
        assert [entry.seq for entry in farm.look("a").entries] == [1, 2, 3]
        assert farm.field("a", "state") == "finished"
        farm.run(renew(lease, 1))
        farm.run(requests.cancel(MODEL, "d", "t", "client"))
        assert farm.field("d", "state") == "cancelled"
        farm.run(requests.follow(MODEL, "b", "api", "t", 0))
        assert farm.field("b", "followers")
        farm.run(release(lease))
        second = farm.run(acquire(MODEL, "r0", "two", 1, lease.epoch))
        assert second is not None
        adopted = farm.claim(second, adopt=True)
        assert {claimed.rid for claimed in adopted.requests} >= {"b", "c"}
        farm.run(write("HSET", "furrow:host:h", "pid", 1, parse=int))
        assert farm.run(end_response("s", "o", b"{}", 60_000, QUOTA)) == b"{}"
    assert farm.put("e").position >= 0


def test_new_work_is_refused_whole(farm: Farm) -> None:
    """Requests and stored responses: the refusal says why, and nothing of them is left."""
    farm.lead()
    key, _ = access.mint(name="k", rpm=5)
    before = sorted(farm.client.scan_iter("*")) if not isinstance(farm.client, Cluster) else []
    with full(farm):
        for refused in (
            lambda: farm.put("a"),
            lambda: farm.run(keep_response(STORED, 60_000, QUOTA)),
            lambda: farm.run(access.spend(key, "a", MODEL, {"a": 10})),
        ):
            with pytest.raises(RedisFull, match="maxmemory"):
                refused()
        assert farm.run(read_response("s", "o")) is None and farm.field("a", "state") is None
        if before:
            assert sorted(farm.client.scan_iter("*")) == before
        memory = server_memory(farm.client)
        assert memory and all(server.most == 1 and server.share > 1 for server in memory)
    assert farm.put("a").rid == "a"


def test_without_the_write_that_changes_nothing_streams_stand_still(
    farm: Farm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: as it is written, without what the loader puts before it, an emission is refused like new work."""
    lease = farm.lead()
    farm.put("a")
    farm.claim(lease)
    monkeypatch.setitem(scripts.SCRIPTS, "emit", scripts.compose(scripts.source("emit")))
    with full(farm), pytest.raises(RedisUnavailable):
        farm.emit(lease, Emission("a", 1, [token(1)]))
    farm.emit(lease, Emission("a", 1, [token(1)]))
