"""Turns of tenants at a shared resource: the tenant that has used it least goes next."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_RECENT = 0.25
"""Weight of the newest turn in a tenant's mean cost."""


@dataclass(eq=False, slots=True)
class Turn:
    """One use of the resource. `cost`, in seconds, replaces the elapsed time where the user measures better."""

    cost: float | None = None


@dataclass(eq=False, slots=True)
class _Tenant:
    used: float
    """Seconds, counted from the least that any tenant had used when this one came."""
    mean: float
    """Seconds of a turn, recent turns weighted most; what a turn is charged until its cost is known."""
    running: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque[asyncio.Future[None]])


class Turns:
    """Shares `places` among tenants by time used (start-time fair queueing, Goyal, Vin and Cheng 1996).

    A tenant that was idle starts with the use of the tenant that was served last, so idleness earns no credit and a
    newcomer waits for the turns that run, not for the turns that wait. The state of a tenant lasts while it counts.
    """

    def __init__(self, places: int = 1, *, mean: float = 0.001, clock: Callable[[], float] = time.monotonic) -> None:
        """`mean`: the seconds that a tenant's first turn is taken to cost."""
        self._places, self._mean, self._clock = places, mean, clock
        self._running = 0
        self._floor = 0.0
        """Use of the tenant that was served last, when its turn began."""
        self._tenants: dict[str, _Tenant] = {}

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def work_waiting(self, tenant: str) -> float:
        """Seconds that the waiting turns of a tenant are expected to cost."""
        state = self._tenants.get(tenant)
        return len(state.waiting) * state.mean if state is not None else 0.0

    def expected_wait(self, tenant: str) -> float:
        """Seconds until the last waiting turn of a tenant is over, if no other tenant comes."""
        own = self.work_waiting(tenant)
        others = sum(min(own, self.work_waiting(name)) for name in self._tenants if name != tenant)
        return (own + others) / self._places

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[Turn]:
        """Wait for a turn of the tenant; it lasts until the block is left, and is charged to the tenant then."""
        state = self._enter(tenant)
        if self._running < self._places and not state.waiting:
            self._begin(state)
        else:
            await self._wait(tenant, state)
        charged, began, turn = state.mean, self._clock(), Turn()
        try:
            yield turn
        finally:
            cost = self._clock() - began if turn.cost is None else turn.cost
            state.used += cost - charged
            state.mean += _RECENT * (cost - state.mean)
            self._end(tenant, state)

    def _enter(self, tenant: str) -> _Tenant:
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant(self._floor, self._mean)
        if not state.running and not state.waiting:
            state.used = max(state.used, self._floor)
        return state

    async def _wait(self, tenant: str, state: _Tenant) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        state.waiting.append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():  # the turn was granted in the moment of the cancellation
                state.used -= state.mean
                self._end(tenant, state)
            elif turn in state.waiting:
                state.waiting.remove(turn)
                self._forget(tenant, state)
            raise

    def _begin(self, state: _Tenant) -> None:
        self._floor = max(self._floor, state.used)
        state.used += state.mean
        state.running += 1
        self._running += 1

    def _end(self, tenant: str, state: _Tenant) -> None:
        state.running -= 1
        self._running -= 1
        while self._running < self._places:
            following = min(
                (one for one in self._tenants.values() if one.waiting), key=lambda one: one.used, default=None
            )
            if following is None:
                break
            turn = following.waiting.popleft()
            if not turn.done():
                self._begin(following)
                turn.set_result(None)
        self._forget(tenant, state)

    def _forget(self, tenant: str, state: _Tenant) -> None:
        """Drop what no longer counts: an idle tenant that would begin at the floor, and all once nobody is served."""
        if not self._running:
            self._tenants = {name: one for name, one in self._tenants.items() if one.waiting}
        elif not state.running and not state.waiting and state.used <= self._floor:
            self._tenants.pop(tenant, None)
