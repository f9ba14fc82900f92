"""Transports of httpx under which a stream outlives the process that sends it.

The work is written once, as coroutines. The synchronous transport runs them on blocking parts: they never wait then.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, TypeVar

import anyio
import httpx

from ops.client.events import EventReader

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_REAPPEARS_WITHIN_S = 5.0
"""Time after a loss of Redis's data in which an API process that follows a request restores it."""
_AWAY = (502, 503)
_WHO = ("authorization", "x-api-key", "user-agent")


class ResumeRefused(httpx.ReadError):
    """A stream was cut, and the farm will not continue it: the request ended long ago, or belongs to another tenant."""


class Origins:
    """The base URLs of the farm's API processes. New requests go where the last one was answered."""

    def __init__(self, also: Sequence[str]) -> None:
        self._also = [httpx.URL(url) for url in also]
        self.current = 0

    def __len__(self) -> int:
        return 1 + len(self._also)

    def place(self, url: httpx.URL, at: int) -> httpx.URL:
        """`url` at origin number `at`; number 0 is its own. Paths are the same everywhere."""
        at %= len(self)
        if at == 0:
            return url
        other = self._also[at - 1]
        return url.copy_with(scheme=other.scheme, host=other.host, port=other.port)


def is_durable(request: httpx.Request) -> bool:
    """True if the request may be repeated: a POST of JSON (its key prevents double work), or following a stream."""
    if request.method == "POST":
        return request.headers.get("content-type", "").startswith("application/json")
    return request.method == "GET" and request.url.path.endswith("/events")


def is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


def with_stream(response: httpx.Response, stream: httpx.SyncByteStream | httpx.AsyncByteStream) -> httpx.Response:
    """`response` with another body."""
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


class Exchange:
    """A durable request whose body was read. Times are in seconds.

    `patience`: how long the farm may be away, counted from the last event. `silence`: a stream that says nothing for so
    long, not even a comment, is taken for cut.
    """

    def __init__(self, request: httpx.Request, origins: Origins, patience: float, silence: float) -> None:
        self._request = request
        self._origins = origins
        self._patience = patience
        self._silence = silence
        self._at = origins.current
        self._failures = 0
        self._progress_at = time.monotonic()
        self.reader = EventReader()
        self._headers = request.headers.copy()
        body = _json_object(request)
        self._streams = request.method == "GET" or bool(body.get("stream"))
        self._ours = False
        if request.method == "POST":
            # The client's own key or policy means that the request may be meant to outlive the client.
            self._ours = not ({"idempotency-key", "x-on-disconnect"} & set(self._headers)) and (
                "on_disconnect" not in body
            )
            self._headers.setdefault("idempotency-key", uuid.uuid4().hex)
            # A cut connection is not a client that left; one that leaves says so (see `goodbye`).
            self._headers.setdefault("x-on-disconnect", str(max(1, round(patience))))

    def attempt(self) -> httpx.Request:
        """The next request: the same bytes, to the current origin, from the last event on."""
        headers = self._headers.copy()
        url = self._origins.place(self._request.url, self._at)
        if url.netloc != self._request.url.netloc:
            headers["host"] = url.netloc.decode()
        if self.reader.last_id is not None:
            headers["last-event-id"] = self.reader.last_id
        extensions: dict[str, Any] = dict(self._request.extensions)
        if self._streams:
            timeout = dict(extensions.get("timeout") or {})
            timeout["read"] = min(timeout.get("read") or self._silence, self._silence)
            extensions["timeout"] = timeout
        return httpx.Request(
            self._request.method, url, headers=headers, content=self._request.content, extensions=extensions
        )

    def progressed(self) -> None:
        """Note an event: `patience` counts from now."""
        self._failures = 0
        self._progress_at = time.monotonic()

    def failed(self, error: httpx.TransportError) -> float:
        """Seconds to wait before the next attempt, at another origin if there is one. Raises `error` at the end."""
        if isinstance(error, httpx.ReadTimeout) and not self._streams:
            raise error  # the caller's own limit
        pause = self._next_pause()
        if pause is None or not self.reader.resumable:
            raise error
        return pause

    def refused(self, response: httpx.Response) -> float | None:
        """Seconds to wait before the next attempt; None if this response is the answer. Raises ResumeRefused."""
        resuming = self.reader.last_id is not None
        status = response.status_code
        if status < 400:
            self._origins.current = self._at % len(self._origins)
            return None
        away = status in _AWAY and response.headers.get("x-should-retry") != "false"
        unknown = resuming and status == 404 and time.monotonic() - self._progress_at < _REAPPEARS_WITHIN_S
        if (away or unknown or (resuming and status == 429)) and (pause := self._next_pause(_retry_after(response))):
            return pause
        if resuming:
            raise self.not_continued(response)
        return None

    def not_continued(self, response: httpx.Response) -> ResumeRefused:
        """The error for a cut stream that was continued with another answer than its rest."""
        place = f"after event {self.reader.last_id}" if self.reader.last_id else "before its first event"
        return ResumeRefused(f"The stream was cut {place}, and continuing it was answered with {response.status_code}.")

    def goodbye(self) -> httpx.Request | None:
        """The request that cancels an unfinished answer; None if there is nothing to cancel."""
        if not self._ours or self.reader.ended or self.reader.last_id is None:
            return None
        rid = self.reader.last_id.partition(":")[0]
        path = self._request.url.path.partition("/v1/")[0] + f"/v1/requests/{rid}"
        url = self._origins.place(self._request.url, self._at).copy_with(path=path, query=None)
        headers = {name: value for name, value in self._headers.items() if name in _WHO}
        limits = dict.fromkeys(("connect", "read", "write", "pool"), 2.0)
        return httpx.Request("DELETE", url, headers=headers, extensions={"timeout": limits})

    def _next_pause(self, least: float = 0.0) -> float | None:
        """Move on to the next origin; the first round is without a pause. None once `patience` is over."""
        self._at += 1
        self._failures += 1
        rounds = self._failures - len(self._origins)
        if rounds < 0:
            pause = 0.001
        else:
            pause = max(least, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(rounds, 10)) * random.uniform(0.5, 1.0))
        over = time.monotonic() + pause - self._progress_at > self._patience
        return None if over else pause


def _json_object(request: httpx.Request) -> dict[str, Any]:
    try:
        body = json.loads(request.content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after-ms", "")) / 1000)
    except ValueError:
        value = response.headers.get("retry-after", "")
        return float(value) if value.isdecimal() else 0.0


# --- the transports ---------------------------------------------------------------------------------------------------


class AsyncResumingTransport(httpx.AsyncBaseTransport):
    """Repeats a POST that was cut, with its Idempotency-Key and Last-Event-ID, until the answer is whole. For
    `httpx.AsyncClient` on asyncio or trio.

    `also`: further base URLs of the same farm, tried in turn. `patience`: seconds without any event after which the
    last error is raised, or the last refusal returned. `silence`: seconds of silence that count as a cut; the API sends
    a comment every 10. Other requests pass through `transport` unchanged.
    """

    def __init__(
        self,
        also: Sequence[str] = (),
        *,
        patience: float = 60.0,
        silence: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._inner = transport or httpx.AsyncHTTPTransport()
        self._origins = Origins(also)
        self._patience = patience
        self._silence = silence

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not is_durable(request):
            return await self._inner.handle_async_request(request)
        await request.aread()
        exchange = Exchange(request, self._origins, self._patience, self._silence)
        response = await self.open(exchange)
        return with_stream(response, _ResumedStream(self, exchange, response)) if is_stream(response) else response

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def pause(self, seconds: float) -> None:
        """Wait between two attempts."""
        await anyio.sleep(seconds)

    async def open(self, exchange: Exchange) -> httpx.Response:
        """The first response that counts. One that is no stream is read whole: a cut in it is a failed attempt."""
        while True:
            try:
                response = await self._inner.handle_async_request(exchange.attempt())
                assert isinstance(response.stream, httpx.AsyncByteStream)
                if is_stream(response):
                    exchange.refused(response)
                    return response
                try:
                    content = b"".join([data async for data in response.stream])
                finally:
                    await response.aclose()
            except httpx.TransportError as error:
                await self.pause(exchange.failed(error))
                continue
            pause = exchange.refused(response)
            if pause is None:
                return with_stream(response, httpx.ByteStream(content))
            await self.pause(pause)

    async def leave(self, exchange: Exchange) -> None:
        """Cancel the request. If that fails, the farm cancels it once `patience` is over."""
        request = exchange.goodbye()
        if request is not None:
            with contextlib.suppress(httpx.HTTPError):
                await (await self._inner.handle_async_request(request)).aclose()


class _ResumedStream(httpx.AsyncByteStream):
    """The bytes of an answer over all its connections."""

    def __init__(self, transport: AsyncResumingTransport, exchange: Exchange, response: httpx.Response) -> None:
        self._transport = transport
        self._exchange = exchange
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        reader = self._exchange.reader
        while True:
            error = httpx.RemoteProtocolError("The stream ended in the middle of an answer.")
            try:
                assert isinstance(self._response.stream, httpx.AsyncByteStream)
                async for data in self._response.stream:
                    if whole := reader.feed(data):
                        exchange.progressed()
                        yield whole
                    if reader.interrupted:
                        break
            except httpx.TransportError as cut:
                error = cut
            else:
                if reader.ended or not reader.resumable:
                    yield reader.rest()
                    return
            if reader.ended:
                return
            await self._response.aclose()
            await self._transport.pause(exchange.failed(error))
            reader.reconnected()
            self._response = await self._transport.open(exchange)
            if not is_stream(self._response):
                raise exchange.not_continued(self._response)

    async def aclose(self) -> None:
        await self._response.aclose()
        await self._transport.leave(self._exchange)


class ResumingTransport(httpx.BaseTransport):
    """As AsyncResumingTransport, for `httpx.Client`, and so for the synchronous SDKs."""

    def __init__(
        self,
        also: Sequence[str] = (),
        *,
        patience: float = 60.0,
        silence: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._inner = transport or httpx.HTTPTransport()
        self._resuming = _Blocking(also, patience=patience, silence=silence, transport=_BlockingInner(self._inner))

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not is_durable(request):
            return self._inner.handle_request(request)
        request.read()
        response = _result(self._resuming.handle_async_request(request))
        assert isinstance(response.stream, httpx.AsyncByteStream)
        return with_stream(response, _BlockingBody(response.stream)) if is_stream(response) else response

    def close(self) -> None:
        self._inner.close()


class _Blocking(AsyncResumingTransport):
    async def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class _BlockingInner(httpx.AsyncBaseTransport):
    """A synchronous transport behind the asynchronous interface."""

    def __init__(self, transport: httpx.BaseTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = self._transport.handle_request(request)
        return with_stream(response, _AwaitedBody(response))


class _AwaitedBody(httpx.AsyncByteStream):
    """The body of a synchronous response, for coroutines."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        assert isinstance(self._response.stream, httpx.SyncByteStream)
        for data in self._response.stream:
            yield data

    async def aclose(self) -> None:
        self._response.close()


class _BlockingBody(httpx.SyncByteStream):
    """A body of coroutines that never wait, for a synchronous client."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        parts = aiter(self._stream)
        while True:
            try:
                data = _result(anext(parts))
            except StopAsyncIteration:
                return
            yield data

    def close(self) -> None:
        _result(self._stream.aclose())


def _result(step: Awaitable[T]) -> T:
    """The result of an awaitable that never waits."""
    try:
        next(iter(step.__await__()))
    except StopIteration as end:
        return end.value
    raise AssertionError("a blocking part of the transport waited")
