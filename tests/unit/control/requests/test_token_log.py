"""A token log takes little room."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from control.messages import LogEntry, TokenLogprobs
from control.requests.token_log import TokenLog


def entry(seq: int) -> LogEntry:
    scored = TokenLogprobs(-0.5, [(seq, -0.5)]) if seq % 7 == 0 else None
    return LogEntry(seq, seq % 3, seq + 1000, "stop" if seq % 50 == 0 else None, None, scored)


@given(st.integers(0, 400), st.integers(-450, 450), st.integers(-450, 450))
def test_it_is_a_list(length: int, start: int, stop: int) -> None:
    """Length, elements and slices are those of the list with the same entries."""
    entries = [entry(seq) for seq in range(1, length + 1)]
    log = TokenLog()
    log.extend(entries)
    assert (len(log), list(log), log[:]) == (length, entries, entries)
    assert log[start:stop] == entries[start:stop]
    assert log[start:] == entries[start:]
    if -length <= start < length:
        assert log[start] == entries[start]


def bytes_each(log: TokenLog | list[LogEntry], count: int = 50_000) -> float:
    tracemalloc.start()
    for seq in range(1, count + 1):
        log.append(LogEntry(seq, 0, 100_000 + seq))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / count


def test_it_takes_little_room() -> None:
    """A token takes under 16 bytes, where a list of the same entries takes six times as much."""
    assert bytes_each(TokenLog()) < 16
    assert bytes_each([]) > 96
