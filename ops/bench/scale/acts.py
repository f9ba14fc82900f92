"""The calls that are measured, each script as API processes and leaders send it, at the size of its largest batch:
those of every day, and those by which requests change hands and end. Then the death of a leader with a large log."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from control import requests
from control.constants import HAND_OUT
from control.messages import LogEntry
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run, run_every, run_steps
from control.replicas.lease import Lease, acquire, holder
from control.requests import Adopted, Claimed, Emission, Enqueue
from control.requests.token_log import WRITE_ENTRIES
from ops.bench.scale.clock import Act, ServerClock
from ops.bench.scale.crowd import MODEL, Size, again, fresh, waiting
from worker.leader.exchange import RedisCalls, RequestReader
from worker.leader.request import RunningRequest
from worker.rank.heartbeat import Heartbeat, Progress

ROWS = 80
"""Requests of which one emit brings a token each: as many as the leader puts into one call."""
ENTRIES = 256
"""Entries of one request that one emit brings: as many as the leader puts into one call."""
CHOICES = 128
"""Of a request that has as many as a client may ask for."""
_LAPSE_S = 0.003
"""In which a deadline of 1 ms passes."""


def entries(after: int, count: int, token: int = 7) -> list[LogEntry]:
    """So many entries of a log that has `after` of them."""
    return [LogEntry(after + 1 + index, 0, token) for index in range(count)]


class Acts:
    """Each of `by_name` makes one call, or a few of one kind, by the clock, with arguments that differ from index to
    index. What it needs it prepares untimed."""

    def __init__(self, client: SyncRedis, clock: ServerClock, lease: Lease, size: Size) -> None:
        self._client = client
        self._clock = clock
        self._lease = lease
        self._size = size
        self._seqs = {claim.rid: claim.seq for claim in adopted(lambda call: run(client, call), lease)}
        self._fresh = itertools.count()
        self._leases: dict[str, Lease] = {}
        self._holder = ""

    def by_name(self) -> dict[str, tuple[Act, int]]:
        """Each with the part of the calls that it is made for: 1 for all, 10 for every tenth."""
        size = self._size
        timed = self._clock.run
        wide = f"ends of {HAND_OUT} of {CHOICES} choices"
        log = entries(0, 2 * WRITE_ENTRIES)

        def follow(index: int) -> object:
            place = index % size.running
            return timed(requests.follow(MODEL, f"logged-{place}", "api-1", f"tenant-{place}", index))

        def cancel(index: int) -> object:
            place = size.waiting - 1 - index
            return timed(requests.cancel(MODEL, f"waiting-{place}", f"tenant-{place % size.tenants}"))

        return {
            "enqueue": (lambda index: timed(requests.enqueue(waiting(size.waiting + index, size))), 1),
            f"emit of {ROWS} rows": (lambda _: self._emit(ROWS, 1), 1),
            f"emit of {ENTRIES} entries": (lambda _: self._emit(1, ENTRIES), 2),
            "follow and a page": (follow, 1),
            "a page of a log": (lambda i: timed(requests.read_log(MODEL, f"logged-{i % size.running}", i)), 1),
            "cancel of what waits": (cancel, 1),
            f"adoption of {HAND_OUT}": (lambda _: timed(requests.adopt(self._lease)), 1),
            f"claim of {HAND_OUT}": (self._claim, 2),
            f"a staged page of {WRITE_ENTRIES}, its request": (
                lambda index: self._clock.run_steps(requests.enqueue_again(again(index, size), log)),
                4,
            ),
            "a batch of a gone api process": (
                lambda index: timed(requests.reap(MODEL, [f"api-{2 + index % max(1, size.apis - 2)}"])),
                2,
            ),
            f"takeover of {HAND_OUT}": (self._take_over, 2),
            f"retirement of {HAND_OUT}": (self._retire, 2),
            "requeue": (self._requeue, 2),
            "position": (lambda i: timed(requests.position(MODEL, f"waiting-{i % size.waiting}")), 2),
            "unfollow, which cancels": (self._unfollow, 2),
            f"expiry of {HAND_OUT}": (lambda _: self._expire(1), 4),
            "repair, a page appended": (lambda _: self._repair(7, "appended"), 5),
            "repair, a page replaced": (lambda _: self._repair(8, "replaced"), 8),
            f"emit of {ROWS} rows that finish, in parts": (self._finish, 10),
            f"{wide}, by claim": (self._claim_ended, 20),
            f"{wide}, by adoption": (self._adopt_ended, 20),
            f"{wide}, by expiry": (lambda _: self._expire(CHOICES), 20),
            f"{wide}, by reap": (self._reap_ended, 20),
        }

    def _emit(self, rows: int, count: int) -> object:
        """`count` entries of each of the first requests that run."""
        running = list(self._seqs.items())[:rows]
        emissions = [Emission(rid, seq + 1, entries(seq, count)) for rid, seq in running]
        for rid, _ in running:
            self._seqs[rid] += count
        return self._clock.run(requests.emit(self._lease, emissions))

    def _claim(self, _: int) -> object:
        claims = self._clock.run(requests.claim(self._lease, HAND_OUT, requests.ANY_TOKENS)).requests
        for claim in claims:
            run(self._client, requests.requeue(self._lease, claim.rid))
        return claims

    # --- a replica goes ----------------------------------------------------------------------------------------------

    def _take_over(self, _: int) -> object:
        """Two replicas, of which one after the other dies, hand the same requests to each other."""
        if not self._holder:
            self._running("left", HAND_OUT)
            self._holder = "left"
        dead = self._holder
        heir = "right" if self._holder == "left" else "left"
        self._client.delete(self._leases[dead].keys.lock)
        lease = self._lead(heir)
        self._holder = heir
        return self._clock.run(requests.takeover(lease, dead))

    def _retire(self, _: int) -> object:
        self._running("gone", HAND_OUT)
        self._client.delete(self._leases["gone"].keys.lock)
        batch = self._clock.run(catalog.retire_batch(MODEL, "gone"))
        catalog.retire(self._client, MODEL, "gone")
        return batch

    def _lead(self, replica: str) -> Lease:
        """A new epoch of the replica, whose lock is free."""
        before = self._leases.get(replica)
        lease = run(self._client, acquire(MODEL, replica, replica, 1, floor=before.epoch if before else 0))
        assert lease is not None
        self._client.pexpire(lease.keys.lock, 600_000)
        self._leases[replica] = lease
        return lease

    def _running(self, replica: str, count: int) -> list[Claimed]:
        """As many requests run on a new epoch of the replica."""
        self._put(count)
        return self._claimed(self._lead(replica), count)

    def _claimed(self, lease: Lease, count: int) -> list[Claimed]:
        claims = list[Claimed]()
        while len(claims) < count:
            claims += run(self._client, requests.claim(lease, count - len(claims), requests.ANY_TOKENS)).requests
        return claims

    # --- one request -------------------------------------------------------------------------------------------------

    def _put(self, count: int = 1, choices: int = 1, **fields: object) -> list[Enqueue]:
        new = [fresh(next(self._fresh), self._size, choices, **fields) for _ in range(count)]
        run_every(self._client, [requests.enqueue(request) for request in new])
        return new

    def _requeue(self, _: int) -> object:
        [claimed] = self._claimed(self._lease, 1)
        return self._clock.run(requests.requeue(self._lease, claimed.rid))

    def _unfollow(self, _: int) -> object:
        [request] = self._put()
        return self._clock.run(requests.unfollow(MODEL, request.rid, request.api))

    def _expire(self, choices: int) -> None:
        late = self._put(HAND_OUT, choices, deadline_ms=1)
        time.sleep(_LAPSE_S)
        ended = 0
        more = True
        while more:
            count, more = self._clock.run(requests.expire(MODEL))
            ended += count
        assert ended == len(late)

    def _finish(self, _: int) -> None:
        self._put(ROWS)
        rows = [
            Emission(claim.rid, claim.seq + 1, [LogEntry(claim.seq + 1, 0, 7, "stop", "token")], "finished")
            for claim in self._claimed(self._lease, ROWS)
        ]
        for call in requests.emit_all(self._lease, rows):
            assert not self._clock.run(call).taken

    def _repair(self, token: int, outcome: str) -> None:
        """Redis has one page of the log, the API process has two. The last token of its first page is `token`."""
        [request] = [fresh(next(self._fresh), self._size)]
        there = entries(0, WRITE_ENTRIES)
        run_steps(self._client, requests.enqueue_again(request, there))
        last = LogEntry(WRITE_ENTRIES, 0, token)
        delivered = [*there[:-1], last, *entries(WRITE_ENTRIES, WRITE_ENTRIES)]
        assert (
            self._clock.run_steps(requests.repair(MODEL, request.rid, request.api, request.tenant, delivered))
            == outcome
        )
        run(self._client, requests.cancel(MODEL, request.rid, request.tenant))

    # --- the end of many choices -------------------------------------------------------------------------------------

    def _claim_ended(self, _: int) -> None:
        self._put(HAND_OUT, CHOICES, priority="high", deadline_ms=1)
        time.sleep(_LAPSE_S)
        while self._clock.run(requests.claim(self._lease, 1, 0)).more:  # without room for what goes on
            pass

    def _adopt_ended(self, _: int) -> None:
        wide = self._put(HAND_OUT, CHOICES, priority="high")
        lease = self._lead("wide")
        self._claimed(lease, HAND_OUT)
        run_every(self._client, [requests.cancel(MODEL, request.rid, request.tenant) for request in wide])
        for claim in adopted(self._clock.run, lease):  # what was claimed in the place of one of them
            run(self._client, requests.requeue(lease, claim.rid))
        self._client.delete(lease.keys.lock)

    def _reap_ended(self, _: int) -> None:
        wide = self._put(HAND_OUT, CHOICES, api="left")
        run_every(self._client, [requests.unfollow(MODEL, request.rid, "left", grace_ms=1) for request in wide])
        time.sleep(_LAPSE_S)
        while self._clock.run(requests.reap(MODEL)).more:
            pass


# --- the death of a leader --------------------------------------------------------------------------------------------


@dataclass
class Recovery:
    """Seconds from the successor's lock until requests were ready for their prefill."""

    ready: list[float] = field(default_factory=list[float])
    entries: int = 0
    lapses: int = 0
    """Looks at the lock at which it was not held."""


def succeed(clients: tuple[SyncRedis, SyncRedis, SyncRedis], dead: Lease) -> Recovery:
    """Adopt with the leader's own parts: its adoption, its reading beside the step loop, its heartbeat."""
    client, blocking, heartbeat_client = clients
    client.delete(dead.keys.lock)
    lease = run(client, acquire(dead.model, dead.replica, "second", 1, floor=dead.epoch))
    assert lease is not None
    began = time.monotonic()
    recovery = Recovery()
    progress = Progress()
    heartbeat = Heartbeat(heartbeat_client, lease.model, lease.replica, lease.epoch, 0, 1, "none", progress, lease)
    with heartbeat:
        calls = RedisCalls(client, blocking, lease, heartbeat.check)
        reading = RequestReader(lease, calls)
        reading.add(adopted(calls.run, lease))
        while reading:
            reading.wait(0.1)
            for request in reading.take():
                assert isinstance(request, RunningRequest), request
                recovery.entries += request.accepted
                recovery.ready.append(time.monotonic() - began)
            recovery.lapses += run(client, holder(lease.model, lease.replica)) != lease.token
        reading.close()
    return recovery


def adopted(send: Callable[[Call[Adopted]], Adopted], lease: Lease) -> list[Claimed]:
    """Every batch, as the leader takes them."""
    batch = send(requests.adopt(lease, ""))
    claims = batch.requests
    while batch.more:
        batch = send(requests.adopt(lease, batch.after))
        claims += batch.requests
    return claims
