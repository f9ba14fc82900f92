"""A token log that is written beside the one in use, a page at a time: a short script then puts it in its place."""

from __future__ import annotations

from collections.abc import Sequence

from control.errors import RedisUnavailable, RequestError
from control.messages import LogEntry
from control.redis.connection import Call, Steps
from control.requests.history import WRITE_ENTRIES
from control.requests.token_log import encode_entry


def stage(key: str, entries: Sequence[LogEntry], count: int) -> Steps[tuple[int, str]]:
    """Write the first `count` of `entries`, which count from seq 1, to the staged log `key`.

    Returns how many have no token, and the choices that have ended in them. Raises RedisUnavailable where the staged
    log lapsed meanwhile.
    """
    without = 0
    ended = list[str]()
    for at in range(0, count, WRITE_ENTRIES):
        page = entries[at : min(count, at + WRITE_ENTRIES)]
        if [entry.seq for entry in page] != list(range(at + 1, at + 1 + len(page))):
            raise RequestError(f"the entries for {key} don't count from 1 without a gap")
        last: int = yield Call("stage", (key,), (at + 1, *(encode_entry(entry) for entry in page)), int)
        if last < at + len(page):
            raise RedisUnavailable(f"The staged token log {key} lapsed while it was written; try again")
        without += tokenless(page)
        ended += ended_in(page).split()
    return without, " ".join(ended)


def tokenless(entries: Sequence[LogEntry]) -> int:
    return sum(entry.token is None for entry in entries)


def ended_in(entries: Sequence[LogEntry]) -> str:
    """The choices that end in these entries, separated by spaces, as the request's hash has them."""
    return " ".join(str(entry.choice) for entry in entries if entry.finish is not None)
