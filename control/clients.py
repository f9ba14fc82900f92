"""The one place where redis-py's clients are made, and where its partial types are narrowed.

Values are text throughout, and the protocol is RESP2, so that every server version answers in the same shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from control.address import address, redacted
from control.errors import RedisUnavailable, SettingsError

if TYPE_CHECKING:
    SyncRedis: TypeAlias = redis.Redis
    AsyncRedis: TypeAlias = redis.asyncio.Redis
else:
    SyncRedis, AsyncRedis = redis.Redis, redis.asyncio.Redis

COMMAND_TIMEOUT_S = 0.8
"""Half the life of a rank's heartbeat, so that a connection that leads nowhere is left before either lapses."""
CONNECT_TIMEOUT_S = 1.0
LONGEST_BLOCK_MS = 500
"""A blocking read asks for at most this: silence for longer is then a connection that leads nowhere."""
BLOCKING_TIMEOUT_S = LONGEST_BLOCK_MS / 1000 + 0.7
"""Found before the shortest deadline of a step has passed."""

_SCHEMES = ("redis", "rediss", "unix")


def connect(url: str) -> SyncRedis:
    """A client for threads: short time-outs, no retries of its own. Connects at its first command."""
    return redis.Redis.from_url(_checked(url), **_options(Retry(NoBackoff(), 0), COMMAND_TIMEOUT_S))


def connect_blocking(url: str) -> SyncRedis:
    """A client for blocking reads of up to LONGEST_BLOCK_MS; keep it for these alone."""
    return redis.Redis.from_url(_checked(url), **_options(Retry(NoBackoff(), 0), BLOCKING_TIMEOUT_S))


def connect_async(url: str) -> AsyncRedis:
    """A client for asyncio, as `connect`."""
    options = _options(AsyncRetry(NoBackoff(), 0), COMMAND_TIMEOUT_S)
    return redis.asyncio.Redis.from_url(_checked(url), **options)


def _options(retry: Any, timeout_s: float) -> dict[str, Any]:
    return {
        "decode_responses": True,
        "protocol": 2,
        "retry": retry,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise SettingsError(f"the Redis URL {redacted_or_scheme(url)} can't be read: {error}") from error
    if parts.scheme not in _SCHEMES:
        raise SettingsError(
            f"the Redis URL {redacted(url)!r} begins with {parts.scheme or 'nothing'}:// ; accepted are "
            "redis://[:PASSWORD@]HOST:PORT/DB, rediss:// (TLS) and unix://PATH"
        )
    if parts.scheme == "unix" and not (parts.path or parts.netloc):
        raise SettingsError(f"the Redis URL {redacted(url)!r} names no socket; write unix:///path/to/redis.sock")
    return url


def redacted_or_scheme(url: str) -> str:
    """A malformed URL can hide its password anywhere: only its scheme is safe to show."""
    return f"{url.partition('://')[0]}://…"


def unavailable(client: SyncRedis | AsyncRedis, error: Exception) -> RedisUnavailable:
    """What to raise for a failed round trip: names the server without its password, and the remedy."""
    where = address(client)
    if isinstance(error, redis_errors.AuthenticationError):
        return RedisUnavailable(
            f"Redis at {where} refused the password ({error}). Put the right one into the URL: redis://:PASSWORD@HOST:PORT/0"
        )
    return RedisUnavailable(
        f"Redis at {where} can't be reached ({str(error) or type(error).__name__}). "
        "Check that it runs and that REDIS_URL or --redis names it."
    )
