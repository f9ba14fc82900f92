"""Background tasks of the event loop: duties that repeat, and ending tasks for certain."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import structlog

from control.errors import RedisUnavailable

log = structlog.stdlib.get_logger(__name__)

_AGAIN_S = 0.5
_LONGEST_S = 5.0


class PeriodicTask:
    """Runs `duty` every `every_s` seconds from `start` to `stop`. A failed run is logged and does not end the task.

    An unavailable Redis is not logged: the heartbeat reports it (see heartbeat.py).
    """

    def __init__(
        self,
        action: str,
        duty: Callable[[], Awaitable[None]],
        every_s: float | Callable[[], float],
        *,
        retry_s: float | None = None,
        delayed: bool = False,
    ) -> None:
        """`action` names the duty in the log. `every_s` may be a function, which is called after each run.

        `retry_s`: the pause after a failed run, which `wake` does not shorten; None: as after any run. `delayed`: the
        first run comes after a pause.
        """
        self._action = action
        self._duty = duty
        self._every_s = every_s
        self._retry_s = retry_s
        self._delayed = delayed
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        return self._task is not None

    def start(self) -> None:
        self._task = asyncio.create_task(self._repeat())

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    def wake(self) -> None:
        """End the present pause, or skip the next one. Returns at once."""
        self._woken.set()

    async def _repeat(self) -> None:
        if self._delayed:
            await self._pause()
        while True:
            succeeded = await self._run()
            if succeeded or self._retry_s is None:
                await self._pause()
            else:
                await asyncio.sleep(self._retry_s)

    async def _run(self) -> bool:
        try:
            await self._duty()
        except RedisUnavailable:
            return False
        except Exception as error:
            log.error("a periodic task failed", action=self._action, exc_info=error)
            return False
        return True

    async def _pause(self) -> None:
        seconds = self._every_s if isinstance(self._every_s, int | float) else self._every_s()
        # Not wait_for: in Python 3.11 it loses a cancel that comes with the wake-up, and `stop` would never end.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._woken.wait()
        self._woken.clear()


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks, again and again for at most five seconds: a library may swallow a cancel beside a result."""
    loop = asyncio.get_running_loop()
    until = loop.time() + _LONGEST_S
    running = set(tasks)
    while running and loop.time() < until:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_AGAIN_S)
