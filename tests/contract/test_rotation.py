"""Redis' password is rotated under running clients: one server, old and new, Sentinel, and a Cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from control.errors import RedisUnavailable
from control.redis.clients import connect, connect_async, credentials_of
from control.redis.cluster import servers_of
from control.redis.connection import arun, read, run, write
from control.redis.urls import credentials_in, without_credentials

USER = "rotated"
RULES = ("on", "~*", "&*", "+@all")
READ = read("GET", "furrow:rotation", parse=str)


@dataclass
class Rotated:
    """A set-up with the user USER, and the file with its URL."""

    servers: list[redis.Redis]
    file: Path
    plain_url: str
    """Without credentials."""

    def write_file(self, password: str) -> None:
        self.file.write_text(self.plain_url.replace("://", f"://{USER}:{password}@") + "\n")

    def set_password(self, password: str) -> None:
        """The only one, from now on: whoever is connected must come again with it."""
        for server in self.servers:
            server.execute_command("ACL", "SETUSER", USER, *RULES, "resetpass", f">{password}")
            server.execute_command("CLIENT", "KILL", "USER", USER)


@pytest.fixture(params=["old_server", "new_server", "sentinel_servers", "cluster_server"])
def rotated(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rotated]:
    url: str = request.getfixturevalue(request.param).url
    with connect(url) as client:
        servers = servers_of(client)
        scene = Rotated(servers, tmp_path / "redis-url", without_credentials(url))
        scene.write_file("first")
        scene.set_password("first")
        run(client, write("SET", "furrow:rotation", "kept", parse=bool))
        yield scene
        for server in servers:
            server.execute_command("ACL", "DELUSER", USER)


def test_clients_go_on_with_the_new_password(rotated: Rotated) -> None:
    """With threads, asyncio and pub/sub; while the file has the old one, the error says what is wrong."""

    async def drive() -> None:
        client, other = connect(str(rotated.file)), connect_async(str(rotated.file))
        pubsub = other.pubsub()
        try:
            await pubsub.subscribe("furrow:c")
            assert run(client, READ) == await arun(other, READ) == "kept"
            rotated.set_password("second")
            with pytest.raises(RedisUnavailable, match=r"refused the password.*processes read it again"):
                run(client, READ)
            rotated.write_file("second")
            assert run(client, READ) == await arun(other, READ) == "kept"
            assert credentials_of(client) == (USER, "second")
            await _heard(pubsub, rotated.servers[0])
        finally:
            client.close()
            await pubsub.aclose()
            await other.aclose()
            manager = getattr(other.connection_pool, "sentinel_manager", None)
            for sentinel in manager.sentinels if manager is not None else ():
                await sentinel.aclose()

    asyncio.run(drive())


async def _heard(pubsub: Any, server: redis.Redis) -> None:
    """The subscription is made again by itself."""
    async with asyncio.timeout(20):
        while True:
            server.publish("furrow:c", "x")
            with contextlib.suppress(redis.ConnectionError):
                message = await pubsub.get_message(timeout=0.05)
                if message is not None and message["type"] == "message":
                    return


def test_without_a_file_the_old_password_stays(rotated: Rotated) -> None:
    """The control: a URL by itself can't be read again."""
    with connect(rotated.file.read_text().strip()) as client:
        assert run(client, READ) == "kept"
        rotated.write_file("second")
        rotated.set_password("second")
        with pytest.raises(RedisUnavailable, match=r"refused the password"):
            run(client, READ)


def test_a_file_that_is_away_or_half_written_changes_nothing(new_server: Any, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text(new_server.url)
    with connect(str(file)) as client:
        assert client.ping()
        for text in ("", "redis", None):
            file.write_text(text) if text is not None else file.unlink()
            client.connection_pool.disconnect()
            assert client.ping()


def test_credentials_of_urls() -> None:
    """Before the host or in the query, escaped or not; none are those of the default user."""
    assert credentials_in("redis+sentinel://me:a%40b@h:1,i:2/farm") == ("me", "a@b")
    assert credentials_in("unix:///s?password=p&db=1") == ("default", "p")
    assert without_credentials("unix:///s?password=p&db=1") == "unix:///s?db=1"
    assert (
        without_credentials("rediss+cluster://me:p@h:1,i:2?ssl_ca_certs=/c")
        == "rediss+cluster://h:1,i:2?ssl_ca_certs=/c"
    )
    assert credentials_in("redis://h") == ("default", "")
