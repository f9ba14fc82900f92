"""Fills a server as a large farm does, by the calls of API processes and leaders; processes.py adds hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from control import requests
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every, run_steps
from control.replicas.lease import Lease, acquire
from control.requests import Enqueue

MODEL = "busy"
REPLICAS = 2
"""Of each model."""
_AT_ONCE = 200


@dataclass(frozen=True)
class Size:
    """The numbers of entries, requests and other things in the farm."""

    entries: int = 1_000_000
    running: int = 100
    """Requests that these entries are the logs of."""
    waiting: int = 100_000
    tenants: int = 1_000
    models: int = 200
    agents: int = 100
    apis: int = 50


def fill(client: SyncRedis, size: Size) -> Lease:
    """Everything of `size`; the lease of the leader that runs what has a log."""
    for name in [MODEL, *(f"model-{index}" for index in range(size.models - 1))]:
        catalog.put_spec(client, ModelSpec(name=name, source="scripted", replicas=REPLICAS))
    run_logged(client, size)
    lease = run(client, acquire(MODEL, "r0", "first", 1))
    assert lease is not None
    while run(client, requests.claim(lease, size.running, requests.ANY_TOKENS)).requests:
        client.pexpire(lease.keys.lock, 600_000)
    for part in _parts(range(size.waiting)):
        run_every(client, [requests.enqueue(waiting(index, size)) for index in part])
    return lease


def run_logged(client: SyncRedis, size: Size) -> None:
    """The requests whose tokens are logged already, shared out so that the longest has four times the shortest's."""
    weights = [1 + 3 * index / max(1, size.running - 1) for index in range(size.running)]
    for index, weight in enumerate(weights):
        length = max(1, int(size.entries * weight / sum(weights)))
        log = [LogEntry(seq, 0, seq % 30_000) for seq in range(1, length + 1)]
        run_steps(client, requests.enqueue_again(_request(f"logged-{index}", f"tenant-{index}", "api-0"), log))


def waiting(index: int, size: Size) -> Enqueue:
    return _request(f"waiting-{index}", f"tenant-{index % size.tenants}", f"api-{index % size.apis}")


def again(index: int, size: Size) -> Enqueue:
    """A request that is written anew with its log, after a loss of data."""
    return waiting(10_000_000 + index, size)


def fresh(index: int, size: Size, choices: int = 1, **fields: Any) -> Enqueue:
    """A request that comes after all that wait; `fields` are those of Enqueue that differ."""
    request = _request(f"fresh-{index}", f"tenant-{index % size.tenants}", f"api-{index % size.apis}", choices)
    return msgspec.structs.replace(request, **fields)


def _request(rid: str, tenant: str, api: str, choices: int = 1) -> Enqueue:
    sampling = Sampling(max_tokens=1 << 30, seed="1", n=choices)
    params = GenerationRequest(prompt=list(range(32)), sampling=sampling)
    return Enqueue(
        rid=rid,
        model=MODEL,
        params=params,
        tenant=tenant,
        api=api,
        max_queued_requests=1 << 40,
        max_queued_tokens=1 << 40,
    )


def _parts(whole: range) -> Iterator[range]:
    for start in range(whole.start, whole.stop, _AT_ONCE):
        yield whole[start - whole.start : start - whole.start + _AT_ONCE]
