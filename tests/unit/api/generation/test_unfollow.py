"""A follower leaves its requests: a call at once for a request that may go on, a joint call for those that are over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from api.generation.follow import Feed, UnfollowQueue
from control.errors import RedisUnavailable
from control.redis.connection import Batches, Call


class Sent(Batches):
    """Keeps what was sent, by round trip: the lane and the ids of the requests."""

    def __init__(self, away: bool = False) -> None:
        self.trips: list[tuple[str, list[str]]] = []
        self._away = away

    async def run_all(self, lane: str, calls: Sequence[Call[Any]]) -> list[Any]:
        self.trips.append((lane, [call.args[1] for call in calls]))
        return [RedisUnavailable("away") if self._away else None for _ in calls]


def feed(rid: str, model: str = "m") -> Feed:
    return Feed(model, rid, "tenant", asyncio.Event(), 0.0)


def test_who_leaves_early_is_told_at_once_in_the_model_s_order() -> None:
    """A client that comes back follows after this, so both must go the same way."""

    async def scene() -> None:
        sent = Sent()
        unfollows = UnfollowQueue(sent, "api")
        unfollows.add(feed("a"), None, 0)
        await asyncio.sleep(0)
        assert sent.trips == [("m", ["a"])]
        await unfollows.stop()

    asyncio.run(scene())


def test_what_is_delivered_shares_a_round_trip() -> None:
    """Several ends of one model are one call, beside the lane in which requests go."""

    async def scene() -> None:
        sent = Sent()
        unfollows = UnfollowQueue(sent, "api")
        for each in (feed("a"), feed("b"), feed("c", "other")):
            unfollows.add(each, 77, 0)
        await asyncio.sleep(0)
        assert sent.trips == []
        async with asyncio.timeout(5):
            while len(sent.trips) < 2:
                await asyncio.sleep(0.001)
        assert sent.trips == [("m delivered", ["a", "b"]), ("other delivered", ["c"])]

    asyncio.run(scene())


def test_stopping_leaves_nothing_unsaid() -> None:
    """Pending calls are sent before the process ends, and an absence of Redis does not delay that."""

    async def scene() -> None:
        sent = Sent(away=True)
        unfollows = UnfollowQueue(sent, "api")
        unfollows.add(feed("a"), 77, 0)
        await unfollows.stop()
        assert sent.trips == [("m delivered", ["a"])]

    asyncio.run(scene())
