"""One replica's Redis for tests of its ranks and its agent: a real private server, empty at the start of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

from control.keys import ReplicaKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, connect, connect_blocking, run
from control.replicas.lease import Lease, acquire
from tests.servers import Server

MODEL, REPLICA = "m", "r0"

T = TypeVar("T")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class ReplicaRedis:
    """Clients of the server, and the shortest words for what tests do with it."""

    url: str
    client: SyncRedis
    stack: ExitStack

    @property
    def keys(self) -> ReplicaKeys:
        return ReplicaKeys(MODEL, REPLICA)

    def run(self, call: Call[T]) -> T:
        return run(self.client, call)

    def another(self, make: Callable[[str], SyncRedis] = connect) -> SyncRedis:
        """One more client, closed at the end of the test."""
        return self.stack.enter_context(closing(make(self.url)))

    def blocking(self) -> SyncRedis:
        return self.another(connect_blocking)

    def lead(self, world_size: int, owner: str = "host/1", floor: int = 0) -> Lease:
        """Take the lock, as a leader does."""
        lease = self.run(acquire(MODEL, REPLICA, owner, world_size, floor))
        assert lease is not None
        return lease

    def lead_for_good(self, world_size: int) -> Lease:
        """As `lead`, with a lock that does not lapse: for a rank whose process takes its time to start."""
        lease = self.lead(world_size)
        self.client.persist(self.keys.lock)
        return lease

    def lapse(self) -> None:
        """The lock is gone for good, as after two seconds without a renewal in which the server was started again."""
        self.client.delete(self.keys.lock, self.keys.server)


@pytest.fixture
def redis(new_server: Server) -> Iterator[ReplicaRedis]:
    with ExitStack() as stack:
        client = stack.enter_context(closing(connect(new_server.url)))
        client.flushall()
        yield ReplicaRedis(new_server.url, client, stack)
