"""Running calls on Redis, from threads and from asyncio: one description of each transition, two ways to send it.

A `Call` is data: what to send and how to read the answer. Every script may be sent twice, so a lost reply is answered
by sending again; redis-py's own retries are off, because they can't know that. What stays unreachable is
RedisUnavailable, and so is a server that can't write just now (loading, out of memory, a failed save, a replica): the
caller holds what it has and tries later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redis import exceptions as redis_errors

from control.clients import AsyncRedis, SyncRedis, connect, connect_async, connect_blocking, unavailable
from control.dead_connections import adrop_idle, drop_idle
from control.errors import FurrowError, RedisUnavailable
from control.readiness import wait_until_ready
from control.scripts import SCRIPTS
from control.transient import transient

__all__ = [
    "Call",
    "arun",
    "arun_all",
    "connect",
    "connect_async",
    "connect_blocking",
    "read",
    "run",
    "run_all",
    "run_every",
    "wait_until_ready",
]

T = TypeVar("T")

RETRY_AFTER_S = (0.02, 0.1, 0.4)
"""Waits before the second, third and fourth sending. Longer outages are the caller's to sit out."""
GIVE_UP_S = 1.5
"""No further sending after so long: where each ends with a time-out, two are enough."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One transition (a script) or one plain read, as data. `parse` may raise a FurrowError."""

    script: str
    """Name of the script, or "" for a plain command, whose words are `args`."""
    keys: tuple[str, ...]
    args: tuple[Any, ...]
    parse: Callable[[Any], T]

    def words(self, *, by_sha: bool) -> list[Any]:
        if not self.script:
            return list(self.args)
        script = SCRIPTS[self.script]
        head = ["EVALSHA", script.sha] if by_sha else ["EVAL", script.text]
        return [*head, len(self.keys), *self.keys, *self.args]


def read(*words: Any, parse: Callable[[Any], T]) -> Call[T]:
    """A plain command as a Call: only for reads and for writes that may be repeated."""
    return Call("", (), words, parse)


def run(client: SyncRedis, call: Call[T]) -> T:
    """Run one call; raises what its parse raises, or RedisUnavailable."""
    return _value(run_all(client, [call])[0])


def run_all(client: SyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """Run the calls in one pipelined round trip; an error of one call stands in its place and spares the others.

    Raises RedisUnavailable when the round trip itself fails after a few quick retries.
    """
    replies = _retried(client, calls, by_sha=True)
    unknown = _unknown(replies)
    if unknown:  # a new or flushed server: send the text of just those
        for i, reply in zip(unknown, _retried(client, [calls[i] for i in unknown], by_sha=False), strict=True):
            replies[i] = reply
    return [_outcome(call, reply) for call, reply in zip(calls, replies, strict=True)]


def run_every(client: SyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """As `run_all`, but raises the first error among the answers."""
    outcomes = run_all(client, calls) if calls else []
    for outcome in outcomes:
        _value(outcome)
    return outcomes


async def arun(client: AsyncRedis, call: Call[T]) -> T:
    """As `run`, on an asyncio client."""
    return _value((await arun_all(client, [call]))[0])


async def arun_all(client: AsyncRedis, calls: Sequence[Call[Any]]) -> list[Any]:
    """As `run_all`, on an asyncio client."""
    replies = await _aretried(client, calls, by_sha=True)
    unknown = _unknown(replies)
    if unknown:
        again = await _aretried(client, [calls[i] for i in unknown], by_sha=False)
        for i, reply in zip(unknown, again, strict=True):
            replies[i] = reply
    return [_outcome(call, reply) for call, reply in zip(calls, replies, strict=True)]


def _retried(client: SyncRedis, calls: Sequence[Call[Any]], *, by_sha: bool) -> list[Any]:
    began = time.monotonic()
    for wait in (*RETRY_AFTER_S, None):
        try:
            pipeline = client.pipeline(transaction=False)
            for call in calls:
                pipeline.execute_command(*call.words(by_sha=by_sha))
            return pipeline.execute(raise_on_error=False)
        except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
            if wait is None or time.monotonic() - began > GIVE_UP_S or not _worth_retrying(error):
                raise unavailable(client, error) from error
            drop_idle(client, error)
            time.sleep(wait)
    raise AssertionError("unreachable")


async def _aretried(client: AsyncRedis, calls: Sequence[Call[Any]], *, by_sha: bool) -> list[Any]:
    began = time.monotonic()
    for wait in (*RETRY_AFTER_S, None):
        try:
            pipeline = client.pipeline(transaction=False)
            for call in calls:
                pipeline.execute_command(*call.words(by_sha=by_sha))
            return await pipeline.execute(raise_on_error=False)
        except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
            if wait is None or time.monotonic() - began > GIVE_UP_S or not _worth_retrying(error):
                raise unavailable(client, error) from error
            await adrop_idle(client, error)
            await asyncio.sleep(wait)
    raise AssertionError("unreachable")


def _worth_retrying(error: Exception) -> bool:
    return not isinstance(error, redis_errors.AuthenticationError)


def _unknown(replies: list[Any]) -> list[int]:
    return [i for i, reply in enumerate(replies) if isinstance(reply, redis_errors.NoScriptError)]


def _outcome(call: Call[Any], reply: Any) -> Any:
    """The parsed answer, or the exception that stands for it."""
    if isinstance(reply, Exception):
        if transient(reply):
            return RedisUnavailable(f"Redis can't serve {call.script or call.args[0]} just now: {reply}")
        return reply
    try:
        return call.parse(reply)
    except FurrowError as error:
        return error


def _value(outcome: Any) -> Any:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
