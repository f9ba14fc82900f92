"""The transport for `httpx.Client`, and so for the synchronous SDKs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import httpx

from ops.client.exchange import Exchange, Origins, is_durable, is_stream, with_stream


class ResumingTransport(httpx.BaseTransport):
    """Repeats a POST that was cut, with its Idempotency-Key and Last-Event-ID, until the answer is whole.

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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._inner = transport or httpx.HTTPTransport()
        self._origins = Origins(also)
        self._patience = patience
        self._silence = silence

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not is_durable(request):
            return self._inner.handle_request(request)
        request.read()
        exchange = Exchange(request, self._origins, self._patience, self._silence)
        response = self.open(exchange)
        if is_stream(response):
            stream: httpx.SyncByteStream = _ResumedStream(self, exchange, response)
            return with_stream(response, stream)
        return response

    def close(self) -> None:
        self._inner.close()

    def open(self, exchange: Exchange) -> httpx.Response:
        """The first response that counts. One that is no stream is read whole: a cut in it is a failed attempt."""
        while True:
            try:
                response = self._inner.handle_request(exchange.attempt())
                assert isinstance(response.stream, httpx.SyncByteStream)
                if is_stream(response):
                    exchange.refused(response)
                    return response
                try:
                    content = b"".join(response.stream)
                finally:
                    response.close()
            except httpx.TransportError as error:
                time.sleep(exchange.failed(error))
                continue
            pause = exchange.refused(response)
            if pause is None:
                return with_stream(response, httpx.ByteStream(content))
            time.sleep(pause)

    def leave(self, exchange: Exchange) -> None:
        """Cancel the request. If that fails, the farm cancels it once `patience` is over."""
        request = exchange.goodbye()
        if request is not None:
            with contextlib.suppress(httpx.HTTPError):
                self._inner.handle_request(request).close()


class _ResumedStream(httpx.SyncByteStream):
    """The bytes of an answer over all its connections."""

    def __init__(self, transport: ResumingTransport, exchange: Exchange, response: httpx.Response) -> None:
        self._transport = transport
        self._exchange = exchange
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        exchange = self._exchange
        reader = self._exchange.reader
        while True:
            error = httpx.RemoteProtocolError("The stream ended in the middle of an answer.")
            try:
                assert isinstance(self._response.stream, httpx.SyncByteStream)
                for data in self._response.stream:
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
            self._response.close()
            time.sleep(exchange.failed(error))
            reader.reconnected()
            self._response = self._transport.open(exchange)
            if not is_stream(self._response):
                raise exchange.not_continued(self._response)

    def close(self) -> None:
        self._response.close()
        self._transport.leave(self._exchange)
