"""The feeds of an answer with several requests."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from api.generation.follow import Feed, Feeds
from control.errors import RequestNotFound
from control.messages import LogEntry
from control.requests import QueuePlace


class FakeFollower:
    """Notes the feeds that it closed and left."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.left: list[tuple[str, int | None, int]] = []

    def open(self, model: str, rid: str, tenant: str, wake: asyncio.Event) -> Feed:
        return Feed(model, rid, tenant, wake, 0.0)

    def close(self, feed: Feed) -> None:
        self.closed.append(feed.rid)

    def leave(self, feed: Feed, delivered_ms: int | None, grace_ms: int) -> None:
        self.left.append((feed.rid, delivered_ms, grace_ms))

    async def meet(self, feeds: list[Feed]) -> None:
        raise RequestNotFound(f"{len(feeds)} are gone")


def feeds_of(*rids: str) -> tuple[Feeds, FakeFollower]:
    follower = FakeFollower()
    feeds = Feeds(cast(Any, follower), "m", "t", rids[0])
    for rid in rids:
        feeds.open(rid)
    return feeds, follower


def test_a_joined_first_member_gives_the_answer_its_id() -> None:
    """A joined later member does not."""
    feeds, follower = feeds_of("a")
    feeds.replace_last("joined")
    assert feeds.rid == "joined" and follower.closed == ["a"]
    feeds.open("b")
    feeds.replace_last("c")
    assert feeds.rid == "joined" and [feed.rid for feed in feeds.members] == ["joined", "c"]


def test_take_shares_its_bound_among_the_members_and_wakes_for_the_rest() -> None:
    """Two entries of each of two members are taken as three and one."""
    feeds, _ = feeds_of("a", "b")
    for feed in feeds.members:
        feed.offer([LogEntry(1, 0, 65), LogEntry(2, 0, 66)], 0.0)
    feeds.wake.clear()
    assert [(member, len(entries)) for member, entries in feeds.take(3)] == [(0, 2), (1, 1)]
    assert feeds.wake.is_set()
    feeds.wake.clear()
    assert [(member, len(entries)) for member, entries in feeds.take(3)] == [(1, 1)]
    assert not feeds.wake.is_set()


async def test_wait_ends_after_its_seconds_and_no_alarm_outlives_the_feeds() -> None:
    """A reader that left is not woken any more."""
    feeds, follower = feeds_of("a")
    await feeds.wait(0.01)
    feeds.wake.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(feeds.wait(0.05), 0.001)
    feeds.leave(7, 3)
    await asyncio.sleep(0.1)
    assert not feeds.wake.is_set() and follower.left == [("a", 7, 3)]


async def test_feeds_that_can_t_be_met_are_left() -> None:
    """The error is the caller's, and Redis is told."""
    feeds, follower = feeds_of("a", "b")
    with pytest.raises(RequestNotFound, match="2 are gone"):
        await feeds.meet()
    assert follower.left == [("a", None, 0), ("b", None, 0)]


async def test_a_place_wakes_a_reader_that_shows_it_and_not_too_often() -> None:
    """Without `watch_place` no place wakes; the one that was shown does not, nor another one too soon, but its end."""
    feeds, _ = feeds_of("a", "b")
    one, two = feeds.members
    assert not one.placed(QueuePlace(9, None), 1.0)
    feeds.watch_place()
    assert one.placed(QueuePlace(8, None), 1.0) and two.placed(QueuePlace(5, 3.0), 1.0)
    assert feeds.wake.is_set() and feeds.place_changed
    feeds.wake.clear()
    assert feeds.show_place(60) == 8 and not feeds.place_changed
    now = asyncio.get_running_loop().time()
    assert not one.placed(QueuePlace(7, None), now) and not feeds.place_changed and not feeds.wake.is_set()
    assert one.placed(QueuePlace(7, None), now + 61) and not one.placed(QueuePlace(8, None), now + 61)
    one.position = two.position = None
    assert feeds.place_changed and feeds.show_place(60) is None
