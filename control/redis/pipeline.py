"""A pipelined round trip to one server in two halves: the commands are sent, and their replies are read later.

redis-py's own pipeline does both in one call. In two halves the caller can work while the server does, and several
shards work at once. redis-py's layers for retries and statistics are not used here: they take as long as the commands
themselves. So `exchange`, for asyncio, does without them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis
import redis.asyncio
from redis import exceptions as redis_errors
from redis.connection import HiredisRespSerializer

_pack = HiredisRespSerializer().pack
"""Packs one command in C. redis-py's asyncio connections pack in Python, which takes ten times as long."""

ABSENT = (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError)


@dataclass(frozen=True, slots=True)
class RedisCommand:
    """The words of a command, and redis-py's options for reading its reply."""

    words: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


class Pipeline:
    """Commands on their way on one connection of a client's pool. Raises redis-py's errors of a broken connection.

    `replies` or `abandon` must follow, or the connection is lost to the pool.
    """

    def __init__(self, client: redis.Redis, commands: Sequence[RedisCommand]) -> None:
        self._client = client
        self._commands = commands
        self._connection: Any = client.connection_pool.get_connection()
        try:
            packed = self._connection.pack_commands([command.words for command in commands])
            self._connection.send_packed_command(packed)
        except BaseException:
            self.abandon()
            raise

    def replies(self) -> list[Any]:
        """The replies in order; a command that the server refused has the error in its place."""
        answers: list[Any] = []
        try:
            for command in self._commands:
                answers.append(self._reply(command))
        except BaseException:
            self.abandon()  # half of an answer may be in it still
            raise
        self._client.connection_pool.release(self._connection)
        return answers

    def _reply(self, command: RedisCommand) -> Any:
        try:
            return self._client.parse_response(self._connection, str(command.words[0]), **command.options)
        except redis_errors.ResponseError as error:
            return error

    def abandon(self) -> None:
        """Give the answer up."""
        self._connection.disconnect()
        self._client.connection_pool.release(self._connection)


async def exchange(client: redis.asyncio.Redis, commands: Sequence[RedisCommand]) -> list[Any]:
    """The replies of one round trip in order, errors in their places. Raises redis-py's errors of a lost connection."""
    pool: Any = client.connection_pool
    connection: Any = await pool.get_connection()
    try:
        await connection.send_packed_command([piece for command in commands for piece in _pack(*command.words)])
        return [await _reply(client, connection, command) for command in commands]
    except BaseException:
        await connection.disconnect(nowait=True)  # half of an answer may be in it still
        raise
    finally:
        await pool.release(connection)


async def _reply(client: redis.asyncio.Redis, connection: Any, command: RedisCommand) -> Any:
    try:
        return await client.parse_response(connection, str(command.words[0]), **command.options)
    except redis_errors.ResponseError as error:
        return error
