"""The death of a leader with a large log: what its successor takes until each stream may go on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from control.redis.clients import SyncRedis
from control.redis.connection import Call, run
from control.replicas.lease import Lease, acquire, holder
from control.requests import Adopted, Claimed, adopt
from worker.leader.exchange import RedisCalls, RequestReader
from worker.leader.request import RunningRequest
from worker.rank.heartbeat import Heartbeat, Progress


@dataclass
class Recovery:
    """Seconds from the successor's lock until requests were ready for their prefill."""

    first: float = 0.0
    last: float = 0.0
    entries: int = 0
    lapses: int = 0
    """Looks at the lock at which it was not held."""
    ready: list[float] = field(default_factory=list)


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
    recovery.first, recovery.last = recovery.ready[0], recovery.ready[-1]
    return recovery


def adopted(send: Callable[[Call[Adopted]], Adopted], lease: Lease) -> list[Claimed]:
    """Every batch, as the leader takes them."""
    claims = list[Claimed]()
    after = ""
    more = True
    while more:
        batch = send(adopt(lease, after))
        claims += batch.requests
        after = batch.after
        more = batch.more
    return claims
