"""The memory of the Redis servers: how much is used, and how much may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import exceptions as redis_errors

from control.redis.address import address
from control.redis.clients import SyncRedis, unavailable
from control.redis.routing import ABSENT, servers_of
from control.sizes import in_words

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
