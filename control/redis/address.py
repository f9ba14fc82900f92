"""Naming a Redis server in messages and logs: never with its password."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit, urlunsplit


def redacted(url: str) -> str:
    """`url` with its password, if any, replaced by ***.

    >>> redacted("redis://:secret@host:6379/0")
    'redis://:***@host:6379/0'
    """
    parts = urlsplit(url)
    if parts.password is None:
        return url
    user, _, place = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:***@{place}"))


def password_in(url: str) -> str | None:
    """The password as it stands in `url`, escapes and all; None where there is none.

    >>> password_in("redis://:se%20cret@host:6379/0")
    'se%20cret'
    """
    user, at, _ = url.partition("://")[2].partition("/")[0].rpartition("@")
    password = user.partition(":")[2] if at else ""
    return password or None


def address(client: Any) -> str:
    """Where a sync or asyncio client connects to, as a URL without credentials."""
    pool = client.connection_pool
    kwargs: dict[str, Any] = pool.connection_kwargs
    database = kwargs.get("db") or 0
    if kwargs.get("path"):
        return f"unix://{kwargs['path']}?db={database}"
    secure = "rediss" if "SSL" in pool.connection_class.__name__ else "redis"
    if shards := getattr(client, "shards", None):
        return f"{secure}+cluster://{_listed(shards.sources)}"
    if manager := getattr(pool, "sentinel_manager", None):
        options = [sentinel.connection_pool.connection_kwargs for sentinel in manager.sentinels]
        places = _listed((one["host"], one["port"]) for one in options)
        return f"{secure}+sentinel://{places}/{pool.service_name}/{database}"
    return f"{secure}://{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}/{database}"


def endpoint(client: Any) -> tuple[str, int] | None:
    """Host and port of a server that a sync client talks to; None for a unix socket.

    Raises redis-py's ConnectionError while the Sentinels know no primary.
    """
    pool = client.connection_pool
    if shards := getattr(client, "shards", None):
        return shards.sources[0]
    if hasattr(pool, "sentinel_manager"):
        return pool.get_master_address()
    kwargs: dict[str, Any] = pool.connection_kwargs
    return (kwargs["host"], kwargs.get("port", 6379)) if kwargs.get("host") else None


def _listed(places: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{host}:{port}" for host, port in places)
