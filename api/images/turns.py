"""Turns of tenants at something that serves one at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class TenantTurns:
    """Serves one at a time; of the tenants that wait each has one turn before any has another. So a tenant waits for at
    most one turn of each other one, however many turns these want."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, in the order of their next turns."""
        self._taken = False

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """Wait for a turn of the tenant; it lasts until the block is left."""
        if self._taken:
            await self._wait(tenant)
        self._taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was given in the moment of the cancellation
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the next turn, whose taker may run a moment later: it is taken until then."""
        self._taken = False
        while self._waiting:
            tenant = next(iter(self._waiting))
            line = self._waiting.pop(tenant)
            turn = line.popleft()
            if line:
                self._waiting[tenant] = line  # behind the others
            if not turn.done():
                self._taken = True
                turn.set_result(None)
                return
