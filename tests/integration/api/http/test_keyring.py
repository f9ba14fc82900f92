"""API keys are cached in an API process: no read per request, changes at the next look, and an outage."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from api.http import gate
from api.http.gate import Keyring
from control import access
from control.errors import RedisUnavailable
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import Batches, connect, connect_async
from tests.servers import NEW, Server, serving


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that a test may kill."""
    with serving(NEW) as server:
        yield server


@pytest.fixture
def operator(own_server: Server) -> Iterator[SyncRedis]:
    with connect(own_server.url) as client:
        yield client


@pytest.fixture
async def client(own_server: Server) -> AsyncIterator[AsyncRedis]:
    client = connect_async(own_server.url)
    yield client
    await client.aclose()


def reads(operator: SyncRedis) -> int:
    """How many records were read so far."""
    return int(operator.info("commandstats").get("cmdstat_hgetall", {}).get("calls", 0))


async def test_a_known_key_costs_no_read(operator: SyncRedis, client: AsyncRedis) -> None:
    """Nor does one that is known not to be there; nor a look when nothing has changed."""
    key, _ = access.mint()
    access.create(operator, key)
    ring = Keyring(Batches(client))
    await ring.look()
    assert await ring.find(key.id) == key
    assert await ring.find("0" * 12) is None
    before = reads(operator)
    for _ in range(20):
        assert await ring.find(key.id) == key
        assert await ring.find("0" * 12) is None
        await ring.look()
    assert reads(operator) == before


async def test_a_change_is_known_at_the_next_look(operator: SyncRedis, client: AsyncRedis) -> None:
    """A revocation, and a key that was made after it had been asked for."""
    key, _ = access.mint()
    ring = Keyring(Batches(client))
    await ring.look()
    assert await ring.find(key.id) is None
    access.create(operator, key)
    await ring.look()
    assert await ring.find(key.id) == key
    revoked = access.revoke(operator, key)
    await ring.look()
    assert await ring.find(key.id) == revoked


async def test_without_a_look_memory_is_not_trusted(
    operator: SyncRedis, client: AsyncRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the looks have stopped, each request asks Redis."""
    key, _ = access.mint()
    access.create(operator, key)
    ring = Keyring(Batches(client))
    await ring.look()
    assert await ring.find(key.id) == key
    revoked = access.revoke(operator, key)
    monkeypatch.setattr(gate, "STALE_S", 0.0)
    assert await ring.find(key.id) == revoked


async def test_known_keys_outlive_an_outage_for_a_while(
    own_server: Server, operator: SyncRedis, client: AsyncRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known keys go on working for a while, and then no longer; of unknown ones nobody can tell."""
    key, _ = access.mint()
    access.create(operator, key)
    ring = Keyring(Batches(client))
    await ring.look()
    assert await ring.find(key.id) == key
    own_server.kill()
    monkeypatch.setattr(gate, "STALE_S", 0.0)
    assert await ring.find(key.id) == key
    with pytest.raises(RedisUnavailable):
        await ring.find("0" * 12)
    monkeypatch.setattr(gate, "AWAY_S", 0.0)
    monkeypatch.setattr(gate, "FORGET_S", 0.0)
    with pytest.raises(RedisUnavailable):
        await ring.find(key.id)


async def test_unknown_keys_take_bounded_memory(
    operator: SyncRedis, client: AsyncRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many unknown ids push out other entries and never grow the process; a key in use stays."""
    monkeypatch.setattr(gate, "MOST_KEYS", 8)
    key, _ = access.mint()
    access.create(operator, key)
    ring = Keyring(Batches(client))
    await ring.look()
    for guess in range(40):
        await ring.find(f"{guess:012x}")
        assert await ring.find(key.id) == key
    before = reads(operator)
    await ring.find(key.id)
    await ring.find(f"{39:012x}")
    assert reads(operator) == before
    await ring.find(f"{0:012x}")
    assert reads(operator) == before + 1


async def test_when_a_key_was_used_is_noted_once_a_minute(operator: SyncRedis, client: AsyncRedis) -> None:
    """However many requests it makes."""
    key, _ = access.mint()
    access.create(operator, key)
    ring = Keyring(Batches(client))
    for _ in range(5):
        ring.mark_used(key.id)
        await ring.look()
    assert access.list_keys(operator)[0][1] > 0
    assert operator.info("commandstats")["cmdstat_set"]["calls"] == 1
