"""The same farm over a fake (logic only), the oldest server, the newest one, and a Cluster of three shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import fakeredis
import pytest

from control import requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, LogEntry, Sampling
from control.redis.clients import SyncRedis
from control.redis.connection import Call, connect, connect_blocking, run, run_steps
from control.replicas.lease import Lease, acquire
from control.requests import Adopted, Claimed, Claims, Emission, EmitResult, Enqueue, Enqueued, Followed

T = TypeVar("T")

MODEL = "m"


@dataclass
class Farm:
    """One model's Redis, and the shortest words for what tests do with it."""

    client: SyncRedis
    blocking: SyncRedis
    url: str | None
    keys: ModelKeys = field(default_factory=lambda: ModelKeys(MODEL))

    def run(self, call: Call[T]) -> T:
        return run(self.client, call)

    def lead(
        self, replica: str = "r0", owner: str = "one", world_size: int = 1, floor: int = 0, weights: str = ""
    ) -> Lease:
        lease = self.run(acquire(MODEL, replica, owner, world_size, floor, weights))
        assert lease is not None
        return lease

    def lose(self, lease: Lease) -> None:
        """The lock lapses, as after two seconds without a renewal."""
        self.client.delete(lease.keys.lock)

    def put(self, rid: str, tenant: str = "t", prompt: int = 3, n: int = 1, **fields: Any) -> Enqueued:
        params = GenerationRequest(prompt=list(range(prompt)), sampling=Sampling(max_tokens=9, n=n))
        delivered: list[LogEntry] = fields.pop("delivered", [])
        request = Enqueue(rid=rid, model=MODEL, params=params, tenant=tenant, **fields)
        return run_steps(self.client, requests.enqueue_again(request, delivered))

    def claim(self, lease: Lease, requests_: int = 100, tokens: int = 10_000, adopt: bool = False) -> Claims:
        """Claim waiting requests; with `adopt`, those that were delivered before come first."""
        claimed, more = self.adopt(lease) if adopt else [], True
        while more:
            claims = self.run(requests.claim(lease, max(0, requests_ - len(claimed)), tokens))
            claimed, more = claimed + claims.requests, claims.more
        return replace(claims, requests=claimed)

    def adopt(self, lease: Lease) -> list[Claimed]:
        return self._in_batches(lambda after: requests.adopt(lease, after))

    def take_over(self, lease: Lease, gone: str) -> list[Claimed]:
        return self._in_batches(lambda after: requests.takeover(lease, gone, after))

    def _in_batches(self, call: Callable[[str], Call[Adopted]]) -> list[Claimed]:
        claimed, batch = list[Claimed](), Adopted([], "", "", True)
        while batch.more:
            batch = self.run(call(batch.after))
            claimed += batch.requests
        return claimed

    def params(self, rid: str) -> GenerationRequest:
        params = self.run(requests.read_params(MODEL, rid))
        assert params is not None
        return params

    def log(self, rid: str) -> list[LogEntry]:
        return [entry for page in requests.read_pages(self.client, MODEL, rid) for entry in page]

    def emit(self, lease: Lease, *rows: Emission) -> EmitResult:
        return self.run(requests.emit(lease, list(rows)))

    def look(self, rid: str, tenant: str = "t", have: int = 0) -> Followed:
        return self.run(requests.follow(MODEL, rid, "", tenant, have))

    def completion_tokens(self, rid: str) -> int:
        """How many entries of a request's log are tokens, by its hash."""
        return int(self.field(rid, "seq") or 0) - int(self.field(rid, "tokenless") or 0)

    def field(self, rid: str, name: str) -> str | None:
        return self.client.hget(self.keys.request(rid), name)

    def load(self, name: str) -> int:
        return int(self.client.hget(self.keys.load, name) or 0)


def rids(claims: Claims) -> list[str]:
    return [claimed.rid for claimed in claims.requests]


def token(seq: int, value: int = 7, choice: int = 0) -> LogEntry:
    return LogEntry(seq, choice, value)


def last(seq: int, value: int = 7, choice: int = 0) -> LogEntry:
    return LogEntry(seq, choice, value, "stop", "token")


@pytest.fixture(params=["fake", "old", "new", "cluster"])
def farm(request: pytest.FixtureRequest) -> Iterator[Farm]:
    if request.param == "fake":
        server = fakeredis.FakeServer()
        client = fakeredis.FakeRedis(server=server, decode_responses=True)
        yield Farm(client, fakeredis.FakeRedis(server=server, decode_responses=True), None)
        return
    url = request.getfixturevalue(f"{request.param}_server").url
    with closing(connect(url)) as client, closing(connect_blocking(url)) as blocking:
        client.flushall()
        yield Farm(client, blocking, url)
