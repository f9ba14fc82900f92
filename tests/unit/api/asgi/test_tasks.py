"""Ending background tasks."""

from __future__ import annotations

import asyncio

from api.asgi.tasks import end


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


async def test_nothing_to_end() -> None:
    """Without tasks, and with one that has ended, it returns at once."""
    done = asyncio.create_task(asyncio.sleep(0))
    await done
    await end()
    await end(done)
    assert not done.cancelled()
