"""The calls that are measured: each script as API processes and leaders send it, at the size of its largest batch."""

from __future__ import annotations

from collections.abc import Callable

from control import requests
from control.constants import HAND_OUT
from control.messages import LogEntry
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas.lease import Lease
from control.requests import Emission
from control.requests.history import WRITE_ENTRIES
from ops.bench.scale.clock import ServerClock
from ops.bench.scale.crowd import MODEL, Size, again, waiting
from ops.bench.scale.takeover import adopted

ROWS = 80
"""Requests of which one emit brings a token each: as many as the leader puts into one call."""
ENTRIES = 256
"""Entries of one request that one emit brings: as many as the leader puts into one call."""

Act = Callable[[int], object]


class Acts:
    """Each of `named` makes one call, or a few of one kind, with arguments that differ from index to index."""

    def __init__(self, client: SyncRedis, clock: ServerClock, lease: Lease, size: Size) -> None:
        self._client, self._clock, self._lease, self._size = client, clock, lease, size
        self._seqs = {one.rid: one.seq for one in adopted(lambda call: run(client, call), lease)}

    def named(self) -> dict[str, tuple[Act, int]]:
        """Each with the part of the calls that it is made for: 1 for all, 10 for every tenth."""
        return {
            "enqueue": (self._enqueue, 1),
            f"emit of {ROWS} rows": (self._emit_rows, 1),
            f"emit of {ENTRIES} entries": (self._emit_entries, 2),
            "follow and a page": (self._follow, 1),
            "a page of a log": (self._read, 1),
            "cancel of what waits": (self._cancel, 1),
            f"adoption of {HAND_OUT}": (lambda _: self._clock.run(requests.adopt(self._lease)), 1),
            f"claim of {HAND_OUT}": (self._claim, 2),
            f"a staged page of {WRITE_ENTRIES}, its request": (self._stage, 4),
            "a batch of a gone api process": (self._reap, 2),
        }

    def _emit_rows(self, _: int) -> object:
        return self._emit([Emission(rid, seq + 1, self._entries(seq, 1)) for rid, seq in self._first(ROWS)])

    def _emit_entries(self, _: int) -> object:
        return self._emit([Emission(rid, seq + 1, self._entries(seq, ENTRIES)) for rid, seq in self._first(1)])

    def _first(self, count: int) -> list[tuple[str, int]]:
        return list(self._seqs.items())[:count]

    def _entries(self, seq: int, count: int) -> list[LogEntry]:
        return [LogEntry(seq + 1 + index, 0, 7) for index in range(count)]

    def _emit(self, rows: list[Emission]) -> object:
        for row in rows:
            self._seqs[row.rid] += len(row.entries)
        return self._clock.run(requests.emit(self._lease, rows))

    def _enqueue(self, index: int) -> object:
        return self._clock.run(requests.enqueue(waiting(self._size.waiting + index, self._size)))

    def _claim(self, _: int) -> object:
        claims = self._clock.run(requests.claim(self._lease, HAND_OUT, requests.ANY_TOKENS)).requests
        for one in claims:
            run(self._client, requests.requeue(self._lease, one.rid))
        return claims

    def _read(self, index: int) -> object:
        return self._clock.run(requests.read_log(MODEL, f"logged-{index % self._size.running}", index))

    def _follow(self, index: int) -> object:
        place = index % self._size.running
        return self._clock.run(requests.follow(MODEL, f"logged-{place}", "api-1", f"tenant-{place}", index))

    def _stage(self, index: int) -> object:
        log = [LogEntry(seq, 0, 7) for seq in range(1, 2 * WRITE_ENTRIES + 1)]
        return self._clock.run_steps(requests.enqueue_again(again(index, self._size), log))

    def _cancel(self, index: int) -> object:
        place = self._size.waiting - 1 - index
        return self._clock.run(requests.cancel(MODEL, f"waiting-{place}", f"tenant-{place % self._size.tenants}"))

    def _reap(self, index: int) -> object:
        return self._clock.run(requests.reap(MODEL, [f"api-{2 + index % max(1, self._size.apis - 2)}"]))
