"""Server-sent events for one client: ready tokens joined, comments meanwhile, an error event at a late failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from litestar.background_tasks import BackgroundTask
from litestar.response import Stream

from api.errors.errors import StreamInterrupted, problem
from api.generation.ongoing import Ongoing

KEEP_ALIVE = b": keep-alive\n"
"""A comment is one line. With an empty line behind it the official clients dispatch an event without data, because they
take the id of the event before for a part of it."""


def sse_response(ongoing: Ongoing) -> Stream:
    """The response of a stream; the client's leaving releases the request."""

    async def release() -> None:
        # Runs after the last byte and after a disconnect; the generator's own end came first where there was one.
        ongoing.left()

    return Stream(
        events(ongoing),
        status_code=200,
        # As a header: the framework would let the handler's annotation decide the media type.
        headers={
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-request-id": ongoing.rid,
        },
        background=BackgroundTask(release),
    )


async def events(ongoing: Ongoing) -> AsyncIterator[bytes]:
    """All bytes of a stream. An exception never leaves the generator: it would cut the connection without a word."""
    renderer = ongoing.renderer
    failure: BaseException | None = None
    try:
        async for data in _tokens(ongoing):
            yield data
        failure = renderer.failure
    except StreamInterrupted as error:
        yield renderer.farewell(error)
        ongoing.release(status=problem(error).status, error="cut by shutdown")
        return
    except Exception as error:
        failure = error
    except (asyncio.CancelledError, GeneratorExit):
        ongoing.left()
        raise
    closing = renderer.end(failure)
    await ongoing.store()
    yield closing
    if failure is None:
        ongoing.release(status=200, delivered=True)
    else:
        ongoing.release(status=problem(failure).status, error=str(failure), delivered=True)


async def _tokens(ongoing: Ongoing) -> AsyncIterator[bytes]:
    """Bytes until every choice has ended. Raises what ended the request from outside."""
    renderer, settings, journal = ongoing.renderer, ongoing.settings, ongoing.journal
    sent_at, told = journal.waited, None
    if prelude := renderer.prelude():
        yield prelude
    while True:
        ongoing.wake.clear()
        ongoing.check_interrupted()
        data = b""
        for member, entries in ongoing.take():
            data += renderer.feed(member, entries)
        if data:
            journal.first_token()
            yield data
            sent_at = journal.waited
        if renderer.finished:
            return
        if ongoing.wake.is_set():
            await ongoing.rest()
            continue
        for feed in ongoing.feeds:
            if feed.error is not None:
                raise feed.error
        pause = settings.keep_alive - (journal.waited - sent_at)
        await ongoing.wait(min(pause, settings.wait_warning) if journal.before_first_token else pause)
        ongoing.warn_if_waiting()
        position = ongoing.position if journal.before_first_token else None
        if position is not None and position != told:
            told = position
            yield b": queue position %d\n" % position
            sent_at = journal.waited
        elif journal.waited - sent_at >= settings.keep_alive - 0.01:
            yield KEEP_ALIVE
            sent_at = journal.waited
