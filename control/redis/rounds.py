"""Round trips of which each depends on the answers before it, written once for threads and for asyncio."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import Call, arun_every, run_every

T = TypeVar("T")

Rounds = Generator[Sequence[Call[Any]], list[Any], T]
"""Yields the calls of one round trip, and receives their values."""


def run_rounds(client: SyncRedis, rounds: Rounds[T]) -> T:
    """Run them one after the other; raises what one of the calls raises."""
    try:
        calls = next(rounds)
        while True:
            calls = rounds.send(run_every(client, calls))
    except StopIteration as end:
        return end.value


async def arun_rounds(client: AsyncRedis, rounds: Rounds[T]) -> T:
    """As `run_rounds`, on an asyncio client."""
    try:
        calls = next(rounds)
        while True:
            calls = rounds.send(await arun_every(client, calls))
    except StopIteration as end:
        return end.value
