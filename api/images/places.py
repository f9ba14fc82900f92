"""Places for fetches of images: a share for each host and tenant, so that a host that hangs holds up nobody else."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

AT_ONCE = 64
"""Fetches of an API process."""
OF_HOST = 16
OF_TENANT = 16
OF_TENANT_AT_HOST = 8
"""Less than the shares of the host and of the tenant: a tenant with slow answers leaves room for other tenants at that
host, and for its own fetches from other hosts."""


class FetchPlaces:
    """At most so many fetches at once, of which each host, each tenant and each tenant at a host has a share.

    Of the fetches for which there is room, one of the tenant with the fewest under way begins; of two such tenants, the
    one that was served longest ago.
    """

    def __init__(
        self,
        at_once: int = AT_ONCE,
        of_host: int = OF_HOST,
        of_tenant: int = OF_TENANT,
        of_tenant_at_host: int = OF_TENANT_AT_HOST,
    ) -> None:
        self._at_once = at_once
        self._of_host = of_host
        self._of_tenant = of_tenant
        self._of_tenant_at_host = of_tenant_at_host
        self._hosts: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._pairs: Counter[tuple[str, str]] = Counter()
        self._waiting: OrderedDict[tuple[str, str], deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant and host; the pairs of the tenant that was served last come last."""

    @asynccontextmanager
    async def place(self, tenant: str, host: str) -> AsyncGenerator[None]:
        """Wait for a place; it is held until the block is left."""
        pair = tenant, host
        if pair not in self._waiting and self._has_room(pair):
            self._take(pair)
        else:
            await self._wait(pair)
        try:
            yield
        finally:
            self._give_back(pair)

    async def _wait(self, pair: tuple[str, str]) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(pair, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the place was granted in the moment of the cancellation
                self._give_back(pair)
            elif turn in (line := self._waiting.get(pair, deque())):
                line.remove(turn)
                self._drop_empty(pair)
            raise

    def _has_room(self, pair: tuple[str, str]) -> bool:
        tenant, host = pair
        return (
            self._tenants.total() < self._at_once
            and self._hosts[host] < self._of_host
            and self._tenants[tenant] < self._of_tenant
            and self._pairs[pair] < self._of_tenant_at_host
        )

    def _take(self, pair: tuple[str, str]) -> None:
        tenant, host = pair
        self._tenants[tenant] += 1
        self._hosts[host] += 1
        self._pairs[pair] += 1

    def _give_back(self, pair: tuple[str, str]) -> None:
        tenant, host = pair
        self._tenants -= Counter({tenant: 1})  # without what has come to 0
        self._hosts -= Counter({host: 1})
        self._pairs -= Counter({pair: 1})
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin the waiting fetches for which there is room."""
        while True:
            ready = [pair for pair in self._waiting if self._has_room(pair)]
            if not ready:
                return
            pair = min(ready, key=lambda one: self._tenants[one[0]])  # the first of equals: served longest ago
            turn = self._waiting[pair].popleft()
            self._drop_empty(pair)
            if turn.done():  # cancelled, and its task has not run yet
                continue
            self._take(pair)
            for other in [one for one in self._waiting if one[0] == pair[0]]:
                self._waiting.move_to_end(other)
            turn.set_result(None)

    def _drop_empty(self, pair: tuple[str, str]) -> None:
        if not self._waiting[pair]:
            del self._waiting[pair]
