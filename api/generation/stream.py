"""Server-sent events for one client: ready tokens joined, comments meanwhile, an error event at a late failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from litestar import Response
from litestar.types import Receive, Scope, Send

from api.errors.errors import ClientDisconnected, StreamInterrupted, problem
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

PLACE_EVERY_S = 5.0
"""Least time between two comments about a client's place in the queue."""


class EventStream(Response[None]):
    """The response of a stream; the client's leaving releases the request.

    It is an ASGI application itself: the framework's stream watches each client with a task of its own, which costs as
    much as the admission of a request.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(None, status_code=200, headers=STREAM_HEADERS | {"x-request-id": session.rid})
        self._session = session

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        return self._send

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        stream = events(self._session)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in stream:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await stream.aclose()
            self._session.left()  # where the client left before the first event


async def events(session: Session) -> AsyncGenerator[bytes]:
    """All bytes of a stream. No exception leaves the generator: it would cut the connection without an error event."""
    renderer = session.renderer
    failure: BaseException | None = None
    try:
        with session.caller.client.watched(session.client_left):
            async for data in _tokens(session):
                yield data
        failure = renderer.failure
    except ClientDisconnected:
        session.left()
        return
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


async def _tokens(session: Session) -> AsyncGenerator[bytes]:
    """Bytes until every choice has ended. Raises what ended the request from outside."""
    feeds, renderer, request_log = session.feeds, session.renderer, session.caller.request_log
    settings = session.settings
    sent_at = request_log.waited
    if request_log.before_first_token:
        feeds.watch_place()
    if prelude := renderer.prelude():
        yield prelude
    if renderer.finished:
        return
    while True:
        feeds.wake.clear()
        session.check_present()
        session.check_interrupted()
        if feeds.ready:
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
        if request_log.before_first_token and feeds.place_changed:
            yield _place(feeds.show_place(PLACE_EVERY_S), feeds.expected_wait_ms)
            sent_at = request_log.waited
        pause = settings.keep_alive - (request_log.waited - sent_at)
        if pause <= 0.01:
            yield KEEP_ALIVE
            sent_at, pause = request_log.waited, settings.keep_alive
        await feeds.wait(pause)


def _place(position: int | None, wait_ms: int | None) -> bytes:
    """The comment about a place in the queue, or about its end."""
    if position is None:
        return b": claimed\n"
    if wait_ms is None:
        return b": queue position %d\n" % position
    return b": queue position %d, expected wait %d ms\n" % (position, wait_ms)
