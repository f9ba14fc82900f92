"""Ending background tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.5
_LONGEST_S = 5.0


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and wait for them, at most five seconds.

    A library may swallow a cancel that comes in the same moment as what it waited for, so it is said again.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + _LONGEST_S
    running = set(tasks)
    while running and loop.time() < until:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_AGAIN_S)
