"""Server-sent events for one client: ready tokens joined, comments meanwhile, an error event at a late failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from litestar.background_tasks import BackgroundTask
from litestar.response import Stream

from api.errors.errors import StreamInterrupted, problem
from api.generation.session import Session

STREAM_HEADERS = {
    # As a header: the framework would let the handler's annotation decide the media type.
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Of every streamed answer; the last one keeps nginx from buffering."""
KEEP_ALIVE = b": keep-alive\n"
"""A comment is one line. With an empty line behind it the official clients dispatch an event without data, because they
take the id of the event before for a part of it."""


def sse_response(session: Session) -> Stream:
    """The response of a stream; the client's leaving releases the request."""

    async def release() -> None:
        # Runs after the last byte and after a disconnect; the generator's own end came first where there was one.
        session.left()

    return Stream(
        events(session),
        status_code=200,
        headers=STREAM_HEADERS | {"x-request-id": session.rid},
        background=BackgroundTask(release),
    )


async def events(session: Session) -> AsyncIterator[bytes]:
    """All bytes of a stream. No exception leaves the generator: it would cut the connection without an error event."""
    renderer = session.renderer
    failure: BaseException | None = None
    try:
        async for data in _tokens(session):
            yield data
        failure = renderer.failure
    except StreamInterrupted as error:
        yield renderer.interruption(error)
        session.release(status=problem(error).status, error="cut by shutdown")
        return
    except Exception as error:
        failure = error
    except (asyncio.CancelledError, GeneratorExit):
        session.left()
        raise
    closing = renderer.end(failure)
    await session.store()
    yield closing
    if failure is None:
        session.release(status=200, delivered=True)
    else:
        session.release(status=problem(failure).status, error=str(failure), delivered=True)


async def _tokens(session: Session) -> AsyncIterator[bytes]:
    """Bytes until every choice has ended. Raises what ended the request from outside."""
    feeds, renderer, request_log = session.feeds, session.renderer, session.caller.request_log
    settings = session.settings
    sent_at, told = request_log.waited, None
    if prelude := renderer.prelude():
        yield prelude
    while True:
        feeds.wake.clear()
        session.check_interrupted()
        data = b""
        for member, entries in session.take():
            data += renderer.feed(member, entries)
        if data:
            request_log.first_token()
            yield data
            sent_at = request_log.waited
        if renderer.finished:
            return
        if feeds.wake.is_set():
            await feeds.rest()
            continue
        feeds.check()
        pause = settings.keep_alive - (request_log.waited - sent_at)
        await feeds.wait(min(pause, settings.wait_warning) if request_log.before_first_token else pause)
        position = feeds.position if request_log.before_first_token else None
        request_log.warn_if_waiting(settings.wait_warning, position)
        if position != told and request_log.before_first_token:
            told = position
            yield _place(position, feeds.expected_wait_ms)
            sent_at = request_log.waited
        elif request_log.waited - sent_at >= settings.keep_alive - 0.01:
            yield KEEP_ALIVE
            sent_at = request_log.waited


def _place(position: int | None, wait_ms: int | None) -> bytes:
    """The comment about a place in the queue, or about its end."""
    if position is None:
        return b": claimed\n"
    if wait_ms is None:
        return b": queue position %d\n" % position
    return b": queue position %d, expected wait %d ms\n" % (position, wait_ms)
