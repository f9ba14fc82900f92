"""Large requests are read in threads of their own, so that the streams of the event loop go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from api.asgi.turns import Turns, current_tenant

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES = 16 * 1024
"""Smaller inputs are read on the event loop: a thread would cost more than it saves."""
_THREADS = 2
"""Each thread that computes makes the event loop wait for the interpreter now and then."""

_readers = ThreadPoolExecutor(_THREADS, "reader")
_turns = Turns(_THREADS, mean=0.05)


async def off_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(…)`, in a thread where what it reads has more than `LARGE_BYTES`: tenants share the threads by time."""
    if size <= LARGE_BYTES:
        return work(*args, **kwargs)
    async with _turns.turn(current_tenant.get()):
        return await asyncio.get_running_loop().run_in_executor(_readers, lambda: work(*args, **kwargs))
