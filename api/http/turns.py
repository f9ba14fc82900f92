"""Turns of tenants at a shared resource: the tenant that has used it least goes next.

The event loop is one such resource. The threads that read large requests, so that the streams of the event loop go on
meanwhile, are another.

The admission of a chat takes one to three milliseconds of the event loop. Without turns a burst of 1,600 streams, or
eight clients that send a chat and leave, delayed all others and `/health` by 5 to 14 s. More API processes would not
help, because a tenant that attacks one reaches all; and a limit that stops eight connections would stop ordinary
clients.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

_RECENT = 0.25
"""Weight of the newest turn in a tenant's mean cost."""

current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")
"""The tenant for which the running task works, where the task does not hand it on itself."""


@dataclass(eq=False, slots=True)
class _Tenant:
    name: str
    used: float
    """Seconds, counted from the least that any tenant had used when this one came."""
    mean: float
    """Seconds of a turn, recent turns weighted most; what a turn is charged until its cost is known."""
    running: int = 0
    waiting: int = 0
    grants: deque[asyncio.Future[float]] = field(default_factory=deque[asyncio.Future[float]])
    """Of the turns that wait, each with the seconds that it is charged; and cancelled ones."""

    def waits(self) -> bool:
        """True if the first grant is one that is waited for."""
        while self.grants and self.grants[0].done():
            self.grants.popleft()
        return bool(self.grants)


Watched = Callable[[Callable[[], object]], AbstractContextManager[object]]
"""A block in which the function is called once nobody needs the turn any more."""


class Turn:
    """One tenant's use of the resource, which `Turns.begin` grants."""

    def __init__(self, turns: Turns, state: _Tenant) -> None:
        self._turns = turns
        self._state = state
        self._charged = 0.0
        """Seconds that stand for the cost until that is known."""
        self.active = False
        """True from the grant to the end."""

    def end(self, cost: float | None) -> None:
        """Give the place to the next tenant. `cost` in seconds; None: nothing was done, which tells nothing of others.

        Later calls do nothing.
        """
        if self.active:
            self._settle(cost)
            self._turns.ended(self._state)

    def spend(self, seconds: float) -> None:
        """Count what the tenant used of the event loop; an active turn ends.

        Its place is free in the next iteration of the loop, so that whatever else is ready comes between two turns.
        """
        if not self.active:
            self._state.used += seconds
            return
        self._settle(seconds)
        self._turns.ended_soon(self._state)

    def _settle(self, cost: float | None) -> None:
        self.active = False
        state = self._state
        state.used += (cost or 0.0) - self._charged
        if cost is not None:
            state.mean += _RECENT * (cost - state.mean)

    async def again(self, watched: Watched = nullcontext) -> None:
        """Wait for another turn of the tenant, unless this one has not ended. Raises as `Turns.begin`."""
        if not self.active:
            self._state, self._charged = await self._turns.wait(self._state.name, watched)
            self.active = True


class Turns:
    """Shares `places` among tenants by time used (start-time fair queueing, Goyal, Vin and Cheng 1996).

    A tenant that was idle starts with the use of the tenant that was served last, so idleness earns no credit and a
    newcomer waits for the turns that run, not for the turns that wait. The state of a tenant lasts while it counts.
    """

    def __init__(self, places: int = 1, *, mean: float = 0.001, clock: Callable[[], float] = time.monotonic) -> None:
        """`mean`: the seconds that a tenant's first turn is taken to cost."""
        self._places = places
        self._mean = mean
        self._clock = clock
        self._running = 0
        self.waiting = 0
        """Turns that wait."""
        self._floor = 0.0
        """Use of the tenant that was served last, when its turn began."""
        self._tenants: dict[str, _Tenant] = {}

    @property
    def running(self) -> int:
        return self._running

    def work_waiting(self, tenant: str) -> float:
        """Seconds that the waiting turns of a tenant are expected to cost."""
        state = self._tenants.get(tenant)
        return state.waiting * state.mean if state is not None else 0.0

    def expected_wait(self, tenant: str) -> float:
        """Seconds until the last waiting turn of a tenant is over, if no other tenant comes."""
        own = self.work_waiting(tenant)
        others = sum(min(own, self.work_waiting(name)) for name in self._tenants if name != tenant)
        return (own + others) / self._places

    async def begin(self, tenant: str, watched: Watched = nullcontext) -> Turn:
        """Wait for a turn of the tenant. `Turn.end` must be called. Raises CancelledError where `watched` ends it."""
        turn = Turn(self, self._state_of(tenant))
        await turn.again(watched)
        return turn

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncGenerator[None]:
        """Wait for a turn of the tenant; it lasts until the block is left, and costs the time that passes in it."""
        turn = await self.begin(tenant)
        began = self._clock()
        try:
            yield
        finally:
            turn.end(self._clock() - began)

    async def wait(self, tenant: str, watched: Watched) -> tuple[_Tenant, float]:
        """Called by `Turn`: wait until a turn is granted; the state of its tenant, and the seconds it was charged."""
        state = self._state_of(tenant)
        if self._running < self._places and not state.waiting:
            return state, self._begin(state)
        grant: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        state.grants.append(grant)
        self._count(state, 1)
        try:
            with watched(grant.cancel):
                return state, await grant
        except BaseException:
            if grant.cancelled():
                self._count(state, -1)  # the grant itself is passed over later
                self._forget(state)
            else:  # granted in the moment of the cancellation
                state.used -= grant.result()
                self.ended(state)
            raise

    def _count(self, state: _Tenant, turns: int) -> None:
        state.waiting += turns
        self.waiting += turns

    def _state_of(self, tenant: str) -> _Tenant:
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant(tenant, self._floor, self._mean)
        if not state.running and not state.waiting:
            state.used = max(state.used, self._floor)
        return state

    def _begin(self, state: _Tenant) -> float:
        """Begin a turn; the seconds that stand for its cost until that is known."""
        self._floor = max(self._floor, state.used)
        state.used += state.mean
        state.running += 1
        self._running += 1
        return state.mean

    def ended_soon(self, state: _Tenant) -> None:
        """Called by `Turn`: as `ended`, in the next iteration of the event loop."""
        asyncio.get_running_loop().call_soon(self.ended, state)

    def ended(self, state: _Tenant) -> None:
        """Called by `Turn`: grant the place to the tenant that has used least."""
        state.running -= 1
        self._running -= 1
        while self._running < self._places:
            waiting = (other for other in self._tenants.values() if other.waits())
            following = min(waiting, key=lambda other: other.used, default=None)
            if following is None:
                break
            # Of tenants that have used the same, the next is the one that was served longest ago.
            self._tenants[following.name] = self._tenants.pop(following.name)
            self._count(following, -1)
            following.grants.popleft().set_result(self._begin(following))
        self._forget(state)

    def _forget(self, state: _Tenant) -> None:
        """Drop what no longer counts: an idle tenant that would begin at the floor, and all once nobody is served."""
        if not self._running:
            self._tenants.clear()
        elif not state.running and not state.waiting and state.used <= self._floor:
            self._tenants.pop(state.name, None)


P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES = 16 * 1024
"""Smaller inputs are read on the event loop: a thread would cost more than it saves."""
_THREADS = 2
"""Each thread that computes makes the event loop wait for the interpreter now and then."""

_readers = ThreadPoolExecutor(_THREADS, "reader")
_turns = Turns(_THREADS, mean=0.05)


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `work(…)`, in a thread if its input has more than `LARGE_BYTES`; tenants share the threads by time."""
    if size <= LARGE_BYTES:
        return work(*args, **kwargs)
    async with _turns.turn(current_tenant.get()):
        return await asyncio.get_running_loop().run_in_executor(_readers, lambda: work(*args, **kwargs))
