"""The one place where redis-py's clients are made, and where its partial types are narrowed.

Values are text throughout, and the protocol is RESP2, so that every server version answers in the same shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import redis
import redis.asyncio
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from control.errors import RedisUnavailable
from control.redis.address import address
from control.redis.routing.cluster import AsyncCluster, Cluster
from control.redis.urls import RedisUrl, parse_redis_url

if TYPE_CHECKING:
    SyncRedis: TypeAlias = redis.Redis
    AsyncRedis: TypeAlias = redis.asyncio.Redis
else:
    SyncRedis, AsyncRedis = redis.Redis, redis.asyncio.Redis

COMMAND_TIMEOUT_S = 0.8
"""Half the life of a rank's heartbeat, so that a connection that leads nowhere is left before that lapses."""
CONNECT_TIMEOUT_S = 1.0
SENTINEL_TIMEOUT_S = 1.0
LONGEST_BLOCK_MS = 500
"""A blocking read asks for at most this: silence for longer is then a connection that leads nowhere."""
BLOCKING_TIMEOUT_S = LONGEST_BLOCK_MS / 1000 + 0.7
"""Found before the shortest deadline of a step has passed."""


def connect(url: str) -> SyncRedis:
    """A client for threads: short time-outs, no retries of its own. Connects at its first command."""
    return _connect(url, COMMAND_TIMEOUT_S)


def connect_blocking(url: str) -> SyncRedis:
    """A client for blocking reads of up to LONGEST_BLOCK_MS; keep it for these alone."""
    return _connect(url, BLOCKING_TIMEOUT_S)


def _connect(url: str, timeout_s: float) -> SyncRedis:
    where, options = parse_redis_url(url), _options(Retry(NoBackoff(), 0), timeout_s)
    if where.kind == "server":
        return redis.Redis.from_url(url, **options)
    options |= {**dict(where.options), "ssl": where.secure}
    if where.kind == "cluster":
        return Cluster(where.nodes, **options)
    sentinels = Sentinel(where.nodes, sentinel_kwargs=_sentinel_options(where, options), **options)
    return sentinels.master_for(where.name)


def connect_async(url: str) -> AsyncRedis:
    """A client for asyncio, as `connect`."""
    where, options = parse_redis_url(url), _options(AsyncRetry(NoBackoff(), 0), COMMAND_TIMEOUT_S)
    if where.kind == "server":
        return redis.asyncio.Redis.from_url(url, **options)
    options |= {**dict(where.options), "ssl": where.secure}
    if where.kind == "cluster":
        return AsyncCluster(where.nodes, **options)
    sentinels = AsyncSentinel(where.nodes, sentinel_kwargs=_sentinel_options(where, options), **options)
    return sentinels.master_for(where.name)


def _options(retry: Any, timeout_s: float) -> dict[str, Any]:
    return {
        "decode_responses": True,
        "protocol": 2,
        "retry": retry,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }


def _sentinel_options(where: RedisUrl, options: dict[str, Any]) -> dict[str, Any]:
    """For the Sentinels themselves: no password and no database, and a hung one is soon passed over."""
    secure = {name: value for name, value in options.items() if name.startswith("ssl_")}
    patience = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    shared = {name: options[name] for name in ("decode_responses", "protocol", "retry")}
    return {**shared, **secure, **patience, "ssl": where.secure}


def unavailable(client: SyncRedis | AsyncRedis, error: Exception) -> RedisUnavailable:
    """The error to raise for a failed round trip: names the server without its password, and the remedy."""
    where = address(client)
    if isinstance(error, redis_errors.AuthenticationError):
        return RedisUnavailable(
            f"Redis at {where} refused the password ({error}). "
            "Put the right one into the URL: redis://:PASSWORD@HOST:PORT/0, for an ACL user redis://USER:PASSWORD@HOST:PORT/0"
        )
    if isinstance(error, redis_errors.BusyLoadingError):
        return RedisUnavailable(f"Redis at {where} loads its data, and answers when it is done ({error}).")
    return RedisUnavailable(
        f"Redis at {where} can't be reached ({str(error) or type(error).__name__}). "
        "Check that it runs and that REDIS_URL or --redis names it."
    )
