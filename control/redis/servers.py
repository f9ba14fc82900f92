"""The servers behind a client: whether they are fit for Furrow, their memory, the round trip to them, and this host's
clock beside theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis import exceptions as redis_errors

from control.errors import RedisUnavailable, SettingsError
from control.redis.clients import SyncRedis, unavailable
from control.redis.cluster import Cluster, servers_of
from control.redis.connection import read, run, transient
from control.redis.pipeline import ABSENT
from control.redis.urls import address
from control.sizes import in_words
from control.version import OLDEST_REDIS

_SAY_EVERY_S = 10.0
"""Between two lines of the same error; another error is told at once."""
_TRY_EVERY_S = 0.25


def wait_until_ready(client: SyncRedis, seconds: float, say: Callable[[str], None]) -> None:
    """Return once Redis answers and is fit for use; `say` gets a line at once, for another
    error, and every ten seconds of waiting.

    Behind Sentinels it is the primary that must answer, of a Cluster every primary, with every slot served; an
    election is waited for. Raises RedisUnavailable after `seconds`, or at once for a wrong password; SettingsError for
    a database that the server does not have, or a server that is too old, evicts keys or is not what its URL says.
    """
    began = reported_at = time.monotonic()
    reported = ""
    while True:
        error = _not_yet(client, say)
        if error is None:
            return
        now = time.monotonic()
        if now - began >= seconds:
            raise error if isinstance(error, RedisUnavailable) else unavailable(client, error) from error
        reason = str(error) or type(error).__name__
        if reason != reported or now - reported_at >= _SAY_EVERY_S:
            reported = reason
            reported_at = now
            say(f"waiting for Redis at {address(client)}: {reason}")
        time.sleep(min(_TRY_EVERY_S, max(0.0, began + seconds - now)))


def _not_yet(client: SyncRedis, say: Callable[[str], None]) -> Exception | None:
    """The error that makes Redis unusable for now, or None. Raises an error that waiting can't cure."""
    try:
        clustered = isinstance(client, Cluster)
        for server in servers_of(client):
            server.ping()
            _check_fitness(server, say, clustered)
            if clustered and "cluster_state:ok" not in _cluster_info(server):
                return RedisUnavailable(f"the Cluster at {address(client)} does not serve all its slots")
    except redis_errors.AuthenticationError as error:
        raise unavailable(client, error) from error
    except ABSENT as error:
        return error
    except RedisUnavailable as error:
        if not _elects(client):
            raise
        return error
    except redis_errors.ResponseError as error:
        if transient(error):  # it is there, and will serve
            return None
        raise SettingsError(
            f"Redis at {address(client)} answers, but not as its URL asks ({error}). "
            "Check the number of the database after the last slash, and what its user may do."
        ) from error
    return None


def _elects(client: SyncRedis) -> bool:
    """True if Sentinels or the Cluster elect a new primary, so that a replica's role is only temporary."""
    return isinstance(client, Cluster) or hasattr(client.connection_pool, "sentinel_manager")


def _cluster_info(server: SyncRedis) -> str:
    server.response_callbacks.pop("CLUSTER INFO", None)
    return str(server.execute_command("CLUSTER INFO"))


def _check_fitness(client: SyncRedis, say: Callable[[str], None], clustered: bool) -> None:
    try:
        info: dict[str, Any] = client.info()
    except redis_errors.ResponseError as error:
        # A restricted user: INFO is no requirement of ours, only a courtesy at start.
        say(f"Redis at {address(client)} does not show INFO ({error}): its version and eviction are unchecked")
        return
    where = address(client)
    mode = str(info.get("redis_mode") or info.get("server_mode"))
    if mode == "sentinel":
        raise SettingsError(f"Redis at {where} is a Sentinel: write redis+sentinel://HOST:PORT,HOST:PORT/NAME")
    if mode == "cluster" and not clustered:
        raise SettingsError(f"Redis at {where} belongs to a Cluster: write redis+cluster://HOST:PORT,HOST:PORT")
    version = str(info.get("valkey_version") or info.get("redis_version", "0"))
    # Valkey reports the Redis version it is compatible with (7.2.4) under redis_version; either is new enough.
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_REDIS:
        raise SettingsError(f"Redis at {where} is version {version}; Furrow needs 6.2 or newer, or Valkey 7.2 or newer")
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        if int(info.get("maxmemory", 0)) > 0:
            raise SettingsError(
                f"Redis at {where} has maxmemory-policy {policy}: it would throw away queued requests. "
                "Set `maxmemory-policy noeviction`, or give Furrow a server of its own."
            )
        say(f"Redis at {where} has maxmemory-policy {policy}: set noeviction before you ever set maxmemory")
    if info.get("role") == "slave":
        raise RedisUnavailable(f"Redis at {where} is a replica: give Furrow the URL of the primary.")


NEARLY_FULL = 0.9


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes of one server. `most` is its maxmemory, 0 for none; `machine` is what its machine has."""

    address: str
    used: int
    most: int
    machine: int

    @property
    def share(self) -> float:
        """The part of maxmemory that is used; 0 where none is set."""
        return self.used / self.most if self.most else 0.0

    @property
    def nearly_full(self) -> bool:
        """True if new requests may soon be refused."""
        return self.share >= NEARLY_FULL

    def __str__(self) -> str:
        limit = f"of {in_words(self.most)} ({self.share:.0%})" if self.most else "(no maxmemory is set)"
        return f"Redis at {self.address} uses {in_words(self.used)} {limit}"


def server_memory(client: SyncRedis) -> list[ServerMemory]:
    """Of each primary; empty where INFO is not allowed. Raises RedisUnavailable."""
    try:
        servers = servers_of(client)
        return [_memory(address(server), server.info("memory")) for server in servers]
    except ABSENT as error:
        raise unavailable(client, error) from error
    except redis_errors.ResponseError:
        return []


def _memory(where: str, info: dict[str, Any]) -> ServerMemory:
    return ServerMemory(
        address=where,
        used=int(info.get("used_memory", 0)),
        most=int(info.get("maxmemory", 0)),
        machine=int(info.get("total_system_memory", 0)),
    )


TRIES = 5


class RoundTrip(NamedTuple):
    """`ms` of the fastest of a few; `skew_ms` is this host's clock minus that of Redis, known to half a round trip."""

    ms: float
    skew_ms: int
    at_ms: int
    """The time by the clock of Redis."""


def measure_round_trip(client: SyncRedis) -> RoundTrip:
    """Ask Redis for its time a few times. Of a Cluster one server is asked. Raises RedisUnavailable."""
    return min((_measure_once(client) for _ in range(TRIES)), key=lambda one: one.ms)


def _measure_once(client: SyncRedis) -> RoundTrip:
    before = time.time()
    began = time.perf_counter()
    server_s = run(client, read("TIME", parse=_seconds))
    took = time.perf_counter() - began
    return RoundTrip(took * 1000, round((before + took / 2 - server_s) * 1000), int(server_s * 1000))


def _seconds(reply: list[str] | tuple[int, int]) -> float:
    seconds, micros = reply
    return int(seconds) + int(micros) / 1e6
