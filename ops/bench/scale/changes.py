"""The calls by which requests change hands and end: a replica or an API process goes, a deadline passes, a log is
repaired."""

from __future__ import annotations

import itertools
import time

from control import requests
from control.constants import HAND_OUT
from control.messages import LogEntry
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every, run_steps
from control.replicas.lease import Lease, acquire
from control.requests import Claimed, Emission, Enqueue
from control.requests.history import WRITE_ENTRIES
from ops.bench.scale.acts import ROWS, Act
from ops.bench.scale.clock import ServerClock
from ops.bench.scale.crowd import MODEL, Size, fresh
from ops.bench.scale.takeover import adopted

CHOICES = 128
"""Of a request that has as many as a client may ask for."""
_LAPSE_S = 0.003
"""In which a deadline of 1 ms passes."""


class Changes:
    """Each of `named` prepares what it needs untimed, and makes its calls by the clock."""

    def __init__(self, client: SyncRedis, clock: ServerClock, lease: Lease, size: Size) -> None:
        self._client, self._clock, self._lease, self._size = client, clock, lease, size
        self._fresh = itertools.count()
        self._leases: dict[str, Lease] = {}
        self._holder = ""

    def named(self) -> dict[str, tuple[Act, int]]:
        """Each with the part of the calls that it is made for, as of Acts."""
        wide = f"ends of {HAND_OUT} of {CHOICES} choices"
        return {
            f"takeover of {HAND_OUT}": (self._take_over, 2),
            f"retirement of {HAND_OUT}": (self._retire, 2),
            "requeue": (self._requeue, 2),
            "position": (self._position, 2),
            "unfollow, which cancels": (self._unfollow, 2),
            f"expiry of {HAND_OUT}": (self._expire, 4),
            "repair, a page appended": (self._append, 5),
            "repair, a page replaced": (self._replace, 8),
            f"emit of {ROWS} rows that finish, in parts": (self._finish, 10),
            f"{wide}, by claim": (self._claim_ended, 20),
            f"{wide}, by adoption": (self._adopt_ended, 20),
            f"{wide}, by expiry": (self._expire_ended, 20),
            f"{wide}, by reap": (self._reap_ended, 20),
        }

    # --- a replica goes ----------------------------------------------------------------------------------------------

    def _take_over(self, _: int) -> object:
        """Two replicas, of which one after the other dies, hand the same requests to each other."""
        if not self._holder:
            self._running("left", HAND_OUT)
            self._holder = "left"
        dead, heir = self._holder, "right" if self._holder == "left" else "left"
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
        found = list[Claimed]()
        while len(found) < count:
            found += run(self._client, requests.claim(lease, count - len(found), requests.ANY_TOKENS)).requests
        return found

    # --- one request -------------------------------------------------------------------------------------------------

    def _put(self, count: int = 1, choices: int = 1, **fields: object) -> list[Enqueue]:
        new = [fresh(next(self._fresh), self._size, choices, **fields) for _ in range(count)]
        run_every(self._client, [requests.enqueue(one) for one in new])
        return new

    def _requeue(self, _: int) -> object:
        [claimed] = self._claimed(self._lease, 1)
        return self._clock.run(requests.requeue(self._lease, claimed.rid))

    def _position(self, index: int) -> object:
        return self._clock.run(requests.position(MODEL, f"waiting-{index % self._size.waiting}"))

    def _unfollow(self, _: int) -> object:
        [one] = self._put()
        return self._clock.run(requests.unfollow(MODEL, one.rid, one.api))

    def _expire(self, _: int) -> None:
        self._expired(1)

    def _expire_ended(self, _: int) -> None:
        self._expired(CHOICES)

    def _expired(self, choices: int) -> None:
        late = self._put(HAND_OUT, choices, deadline_ms=1)
        time.sleep(_LAPSE_S)
        ended, more = 0, True
        while more:
            count, more = self._clock.run(requests.expire(MODEL))
            ended += count
        assert ended == len(late)

    def _finish(self, _: int) -> None:
        self._put(ROWS)
        rows = [
            Emission(one.rid, one.seq + 1, [LogEntry(one.seq + 1, 0, 7, "stop", "token")], "finished")
            for one in self._claimed(self._lease, ROWS)
        ]
        for call in requests.emit_all(self._lease, rows):
            assert not self._clock.run(call).taken

    # --- a log that was set back -------------------------------------------------------------------------------------

    def _append(self, _: int) -> None:
        self._repair(7, "appended")

    def _replace(self, _: int) -> None:
        self._repair(8, "replaced")

    def _repair(self, token: int, how: str) -> None:
        """A page is there, and the API process has another page; its last token there is `token`."""
        [one] = [fresh(next(self._fresh), self._size)]
        there = [LogEntry(seq, 0, 7) for seq in range(1, WRITE_ENTRIES + 1)]
        run_steps(self._client, requests.enqueue_again(one, there))
        more = [LogEntry(seq, 0, 7) for seq in range(WRITE_ENTRIES + 1, 2 * WRITE_ENTRIES + 1)]
        given = [*there[:-1], LogEntry(WRITE_ENTRIES, 0, token), *more]
        assert self._clock.run_steps(requests.repair(MODEL, one.rid, one.api, one.tenant, given)) == how
        run(self._client, requests.cancel(MODEL, one.rid, one.tenant))

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
        run_every(self._client, [requests.cancel(MODEL, one.rid, one.tenant) for one in wide])
        for one in adopted(self._clock.run, lease):  # what was claimed in the place of one of them
            run(self._client, requests.requeue(lease, one.rid))
        self._client.delete(lease.keys.lock)

    def _reap_ended(self, _: int) -> None:
        wide = self._put(HAND_OUT, CHOICES, api="left")
        run_every(self._client, [requests.unfollow(MODEL, one.rid, "left", grace_ms=1) for one in wide])
        time.sleep(_LAPSE_S)
        while self._clock.run(requests.reap(MODEL)).more:
            pass
