"""A feed delivers each entry once, in order: whatever arrives, and never grows without bound."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from api.generation.follow import BUFFER_ENTRIES, Feed
from control.messages import LogEntry


def entries(first: int, last: int) -> list[LogEntry]:
    return [LogEntry(seq, 0, seq) for seq in range(first, last + 1)]


def feed() -> Feed:
    return Feed("m", "r", "t", asyncio.Event(), 0.0)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5), st.booleans())))
def test_in_order_and_once(arrivals: list[tuple[int, int, bool]]) -> None:
    """Repeats, gaps and late batches, taken at any moment: the reader sees 1, 2, 3 …"""
    one, got = feed(), []
    for first, count, take in arrivals:
        one.offer(entries(first, first + count), 1.0)
        if take:
            got += one.take()
    got += one.take()
    assert [entry.seq for entry in got] == list(range(1, len(got) + 1))


def test_a_gap_asks_for_the_log() -> None:
    """An entry too far ahead is not kept; the reader's feed asks for what lies between."""
    one, asked = feed(), []
    one.on_hungry(asked.append)
    one.offer(entries(1, 2), 1.0)
    one.offer(entries(5, 6), 1.0)
    assert asked == []  # there is something to read first
    assert [entry.seq for entry in one.take()] == [1, 2]
    assert asked == [one] and one.behind and one.have == 2
    one.offer(entries(3, 6), 1.0)
    assert [entry.seq for entry in one.take()] == [3, 4, 5, 6]
    assert not one.behind


def test_a_slow_reader_costs_a_position() -> None:
    """Beyond the bound nothing is buffered; it is read from the log later."""
    one = feed()
    for seq in range(1, 10 * BUFFER_ENTRIES):
        one.offer(entries(seq, seq), 1.0)
    assert len(one.take()) == BUFFER_ENTRIES
    assert one.behind and one.take() == []


def test_what_contradicts_stops_the_feed_until_it_is_repaired() -> None:
    """Entries of another continuation are not mixed in; after the repair the feed goes on."""
    one, asked = feed(), []
    one.on_hungry(asked.append)
    one.offer(entries(1, 3), 1.0)
    one.offer([LogEntry(3, 0, 99)], 1.0)
    assert one.diverged and asked == [one]
    one.offer(entries(4, 5), 1.0)
    assert [entry.seq for entry in one.take()] == [1, 2, 3]
    one.repaired()
    one.offer(entries(4, 5), 1.0)
    assert [entry.seq for entry in one.take()] == [4, 5]


def test_what_was_announced_and_lost_is_not_asked_for_again() -> None:
    """An event told of entries that a failover then took away: one look at the log is enough."""
    one, asked = feed(), []
    one.on_hungry(asked.append)
    one.offer(entries(1, 2), 1.0)
    one.offer(entries(8, 9), 1.0)
    one.take()
    assert asked == [one]
    one.offer(entries(2, 2), 1.0, rest=True)
    assert asked == [one] and not one.behind
