"""The one place where redis-py's clients are made, and where its partial types are narrowed.

Values are text throughout, and the protocol is RESP2, so that every server version answers in the same shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import control.logs  # noqa: F401  before structlog, which imports rich without it

# isort: split
import redis
import redis.asyncio
import structlog
from redis import exceptions as redis_errors
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel

from control.errors import RedisUnavailable, SettingsError
from control.redis.cluster import AsyncCluster, Cluster
from control.redis.urls import RedisUrl, address, credentials_in, parse_redis_url, without_credentials
from control.settings import redis_url

if TYPE_CHECKING:
    SyncRedis: TypeAlias = redis.Redis
    AsyncRedis: TypeAlias = redis.asyncio.Redis
else:
    SyncRedis = redis.Redis
    AsyncRedis = redis.asyncio.Redis

log = structlog.stdlib.get_logger(__name__)

COMMAND_TIMEOUT_S = 0.8
"""Half the life of a rank's heartbeat, so that a connection that leads nowhere is left before that lapses."""
CONNECT_TIMEOUT_S = 1.0
SENTINEL_TIMEOUT_S = 1.0
LONGEST_BLOCK_MS = 500
"""A blocking read asks for at most this: silence for longer is then a connection that leads nowhere."""
BLOCKING_TIMEOUT_S = LONGEST_BLOCK_MS / 1000 + 0.7
"""Found before the shortest deadline of a step has passed."""


class FileCredentials(CredentialProvider):
    """User name and password of the URL in a file, read again for each connection: a password is rotated by writing
    the file, without a restart. The rest of the URL is read once.

    While the file can't be read, the credentials that it held last are used.
    """

    def __init__(self, named: str) -> None:
        """`named`: the path of the file or of a private server's data folder."""
        self._named = named
        self._credentials = credentials_in(redis_url(named))

    def get_credentials(self) -> tuple[str, str]:
        try:
            credentials = credentials_in(redis_url(self._named))
        except SettingsError as error:
            log.warning("the Redis URL file can't be read", action="redis_url_file", error=str(error))
            return self._credentials
        if credentials != self._credentials:
            self._credentials = credentials
            log.info("other credentials for Redis were read", action="redis_credentials", file=self._named)
        return credentials

    async def get_credentials_async(self) -> tuple[str, str]:
        return self.get_credentials()


def connect(named: str) -> SyncRedis:
    """A client for threads: short time-outs, no retries of its own. Connects at its first command.

    `named` is a URL, or the path of a file with one (`FileCredentials`). Raises SettingsError where it can't be read.
    """
    return _connect(named, COMMAND_TIMEOUT_S, _THREADS)


def connect_blocking(named: str) -> SyncRedis:
    """A client for blocking reads of up to LONGEST_BLOCK_MS; keep it for these alone."""
    return _connect(named, BLOCKING_TIMEOUT_S, _THREADS)


def connect_async(named: str) -> AsyncRedis:
    """A client for asyncio, as `connect`."""
    return _connect(named, COMMAND_TIMEOUT_S, _ASYNCIO)


class _Classes(NamedTuple):
    """redis-py's classes, which it has twice, and the two of a Cluster."""

    server: Any
    cluster: Any
    sentinel: Any
    retry: Any


_THREADS = _Classes(redis.Redis, Cluster, Sentinel, Retry)
_ASYNCIO = _Classes(redis.asyncio.Redis, AsyncCluster, AsyncSentinel, AsyncRetry)


def _connect(named: str, timeout_s: float, classes: _Classes) -> Any:
    options: dict[str, Any] = {
        "decode_responses": True,
        "protocol": 2,
        "retry": classes.retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
    }
    where = _place(named, options)
    if where.kind == "server":
        return classes.server.from_url(where.text, **options)
    options |= {**dict(where.options), "ssl": where.secure}
    if where.kind == "cluster":
        return classes.cluster(where.nodes, **options)
    sentinels = classes.sentinel(where.nodes, sentinel_kwargs=_sentinel_options(where, options), **options)
    return sentinels.master_for(where.name)


def _place(named: str, options: dict[str, Any]) -> RedisUrl:
    """The server to connect to; the credentials of a file become an option of the client. Raises SettingsError."""
    url = redis_url(named)
    if named == url:
        return parse_redis_url(url)
    parse_redis_url(url)  # an error shows the URL as it was written
    options["credential_provider"] = FileCredentials(named)
    return parse_redis_url(without_credentials(url))


def _sentinel_options(where: RedisUrl, options: dict[str, Any]) -> dict[str, Any]:
    """For the Sentinels themselves: no password and no database, and a hung one is soon passed over."""
    secure = {name: value for name, value in options.items() if name.startswith("ssl_")}
    patience = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    shared = {name: options[name] for name in ("decode_responses", "protocol", "retry")}
    return {**shared, **secure, **patience, "ssl": where.secure}


def credentials_of(client: SyncRedis) -> tuple[str, str]:
    """User name and password that its next connection will use; the password may be empty."""
    kwargs: dict[str, Any] = client.connection_pool.connection_kwargs
    provider = kwargs.get("credential_provider")
    if isinstance(provider, FileCredentials):
        return provider.get_credentials()
    return str(kwargs.get("username") or "default"), str(kwargs.get("password") or "")


def unavailable(client: SyncRedis | AsyncRedis, error: Exception) -> RedisUnavailable:
    """The error to raise for a failed round trip: names the server without its password, and the remedy."""
    where = address(client)
    if isinstance(error, redis_errors.AuthenticationError):
        return RedisUnavailable(
            f"Redis at {where} refused the password ({error}). "
            "Put the right one into the URL: redis://:PASSWORD@HOST:PORT/0, for an ACL user "
            "redis://USER:PASSWORD@HOST:PORT/0. Where REDIS_URL or --redis names a file, processes read it again; "
            "else restart them"
        )
    if isinstance(error, redis_errors.BusyLoadingError):
        return RedisUnavailable(f"Redis at {where} loads its data, and answers when it is done ({error}).")
    return RedisUnavailable(
        f"Redis at {where} can't be reached ({str(error) or type(error).__name__}). "
        "Check that it runs and that REDIS_URL or --redis names it."
    )
