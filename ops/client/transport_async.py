"""The transport for `httpx.AsyncClient`, and so for the asynchronous SDKs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

import anyio
import httpx

from ops.client.exchange import Exchange, Origins, is_durable, is_stream, with_stream


class AsyncResumingTransport(httpx.AsyncBaseTransport):
    """As ResumingTransport, on asyncio or trio."""

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
        if is_stream(response):
            stream: httpx.AsyncByteStream = _ResumedStream(self, exchange, response)
            return with_stream(response, stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()

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
                await anyio.sleep(exchange.failed(error))
                continue
            pause = exchange.refused(response)
            if pause is None:
                return with_stream(response, httpx.ByteStream(content))
            await anyio.sleep(pause)

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
            await anyio.sleep(exchange.failed(error))
            reader.reconnected()
            self._response = await self._transport.open(exchange)
            if not is_stream(self._response):
                raise exchange.not_continued(self._response)

    async def aclose(self) -> None:
        await self._response.aclose()
        await self._transport.leave(self._exchange)
