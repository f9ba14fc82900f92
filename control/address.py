"""Naming a Redis server in messages and logs: never with its password."""

from __future__ import annotations

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


def address(client: Any) -> str:
    """Where a sync or asyncio client connects to, as a URL without credentials."""
    kwargs: dict[str, Any] = client.connection_pool.connection_kwargs
    database = kwargs.get("db") or 0
    if kwargs.get("path"):
        return f"unix://{kwargs['path']}?db={database}"
    secure = "SSL" in client.connection_pool.connection_class.__name__
    return (
        f"{'rediss' if secure else 'redis'}://{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}/{database}"
    )
