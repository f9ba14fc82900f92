"""Background tasks of the event loop: their ends and failures."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from api.http.tasks import PeriodicTask, end
from control.errors import RedisUnavailable


class Duty:
    """Counts its runs; each fails with the next of `failures`, as long as there are any."""

    def __init__(self, *failures: Exception) -> None:
        self.runs = 0
        self._failures = list(failures)
        self._news = asyncio.Event()

    async def __call__(self) -> None:
        self.runs += 1
        self._news.set()
        if self._failures:
            raise self._failures.pop(0)

    async def reach(self, runs: int) -> None:
        async with asyncio.timeout(5):
            while self.runs < runs:
                self._news.clear()
                await self._news.wait()


@pytest.mark.parametrize("failure", [RedisUnavailable("away"), ValueError("broken")])
async def test_a_failed_run_does_not_end_a_periodic_task(failure: Exception) -> None:
    """Only a failure that is not of Redis is logged: the heartbeat reports an unavailable Redis."""
    duty = Duty(failure, failure)
    task = PeriodicTask("sweep", duty, 0.001)
    with structlog.testing.capture_logs() as lines:
        task.start()
        await duty.reach(3)
        await task.stop()
    log_lines = [(line["action"], line["exc_info"]) for line in lines]
    assert log_lines == ([] if isinstance(failure, RedisUnavailable) else [("sweep", failure)] * 2)


async def test_wake_ends_the_pause_of_a_periodic_task() -> None:
    """Also when it comes while the duty runs."""
    duty = Duty()
    task = PeriodicTask("sweep", duty, lambda: 1000.0, delayed=True)
    task.start()
    await asyncio.sleep(0)
    assert duty.runs == 0
    for runs in (1, 2):
        task.wake()
        await duty.reach(runs)
    await task.stop()
    await asyncio.sleep(0.002)
    assert duty.runs == 2


async def test_wake_does_not_shorten_the_pause_after_a_failed_run() -> None:
    duty = Duty(RedisUnavailable("away"))
    task = PeriodicTask("sweep", duty, 0.0, retry_s=0.05)
    task.start()
    await duty.reach(1)
    began = asyncio.get_running_loop().time()
    task.wake()
    await duty.reach(2)
    assert asyncio.get_running_loop().time() - began >= 0.04
    await task.stop()


async def test_a_periodic_task_that_was_never_started_can_be_stopped() -> None:
    task = PeriodicTask("sweep", Duty(), 1.0)
    await task.stop()
    assert not task.started


async def test_a_cancel_that_was_swallowed_is_said_again() -> None:
    """A task that loses the first cancel, as libraries do now and then, ends all the same."""
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await end(task)
    assert task.cancelled()
    assert swallowed == 1


async def test_ending_without_tasks_returns_at_once() -> None:
    """Without tasks, and with one that has ended, it returns at once."""
    done = asyncio.create_task(asyncio.sleep(0))
    await done
    await end()
    await end(done)
    assert not done.cancelled()
