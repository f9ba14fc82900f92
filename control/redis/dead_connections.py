"""Connections that are dead without having said so: how they are told, and that a client keeps none of them."""

from __future__ import annotations

from typing import Any

from redis import exceptions as redis_errors

from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.routing.cluster import AsyncCluster, Cluster


class _SaysSo:
    """Mixed into an asyncio connection: a transport that is closed already counts as a broken connection.

    uvloop raises RuntimeError where asyncio's own transports drop what is written.
    """

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        try:
            await super().send_packed_command(*args, **options)  # type: ignore[misc]
        except RuntimeError as error:
            raise redis_errors.ConnectionError(f"the connection is closed: {error}") from error


def hardened(client: AsyncRedis) -> AsyncRedis:
    """`client`, with connections that say when they are closed."""
    if not isinstance(client, AsyncCluster):
        pool = client.connection_pool
        plain = pool.connection_class
        pool.connection_class = type(plain.__name__, (_SaysSo, plain), {})
    return client


def drop_idle(client: SyncRedis, error: Exception) -> None:
    """After a time-out the idle connections are as suspect as the one that met it; each would cost another."""
    if isinstance(error, redis_errors.TimeoutError) and not isinstance(client, Cluster):
        client.connection_pool.disconnect(inuse_connections=False)


async def adrop_idle(client: AsyncRedis, error: Exception) -> None:
    """As `drop_idle`."""
    if isinstance(error, redis_errors.TimeoutError) and not isinstance(client, AsyncCluster):
        await client.connection_pool.disconnect(inuse_connections=False)
