"""One client's connection: bounds on what it sends around its requests, and on how long it takes nothing.

Heads, header lines, trailers, pipelined requests and their time are bounded; uvicorn and httptools bound none of them.
A limit is checked before the parser keeps what is beyond it. Where too many connections are open, one closes that has
not sent the whole head of a request. A reader that stalls is cut, so that it holds neither memory nor a worker for
ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import httptools
import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from api.asgi.bodies import KIB, MIB
from api.asgi.client import Client, UnreadBodies, client_of, set_client
from api.errors.errors import refusal_bytes

log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Sizes are in bytes, times in seconds."""

    head_bytes: int = 64 * KIB
    """Request line, header lines and trailers of one request; beyond it 431."""
    head_lines: int = 256
    """Header lines: each costs Python some 130 bytes beside its own."""
    head_timeout: float = 10.0
    """From the first byte of a head, or from the connection's begin, to the head's end."""
    heads_bytes: int = 16 * MIB
    """All heads that are not complete; beyond it the oldest connection with a part of one is closed."""
    unread_bytes: int = 64 * MIB
    """Bodies whose requests wait for their turn; beyond it the request gets 429 whose body comes."""
    admission_s: float = 3.0
    """Work of a tenant's requests that wait for their turn, in seconds of the event loop; beyond it they get 429."""
    connections: int = 8192
    """Beyond it the connection closes that has waited longest without a request; with none, the new one gets 503."""
    pipelined: int = 16
    """Requests that wait behind the one that is answered; what comes after them is not read."""
    rest_timeout: float = 5.0
    """For the rest of a body whose request was answered before it had come whole; then the connection is closed."""
    rest_bytes: int = 8 * MIB
    """How much of that rest is read."""


class Closable(Protocol):
    def abort(self) -> None: ...


class Waiting:
    """Every connection between requests, in the order in which they began to wait, and the bytes of partial heads."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all: dict[Closable, None] = {}
        self._partial: dict[Closable, int] = {}
        self.held_bytes = 0

    def enter(self, connection: Closable) -> None:
        """The connection waits for the first byte of a request."""
        self.leave(connection)
        self._all[connection] = None

    def hold(self, connection: Closable, size: int) -> None:
        """`size` bytes of an incomplete head are held; the oldest connection with a partial head may close."""
        self.held_bytes += size - self._partial.get(connection, 0)
        self._partial[connection] = size
        while self.held_bytes > self._limits.heads_bytes:
            oldest = next(iter(self._partial))
            self._close(oldest, "partial heads of requests take too much memory")

    def leave(self, connection: Closable) -> None:
        """The connection has sent a whole head, or is gone."""
        self._all.pop(connection, None)
        self.held_bytes -= self._partial.pop(connection, 0)

    def make_room(self, connections: int, newest: Closable) -> bool:
        """Close the connection that has waited longest where more than the limit are open. False: none waits."""
        if connections <= self._limits.connections:
            return True
        oldest = next(iter(self._all), newest)
        if oldest is newest:
            return False
        self._close(oldest, "too many connections are open")
        return True

    def _close(self, connection: Closable, why: str) -> None:
        self.leave(connection)
        log.info("a connection without a request is closed", action="close_waiting", why=why)
        connection.abort()


class ServerConfig(uvicorn.Config):
    """Uvicorn's settings, the limits of connections, a reader's patience in seconds, and whether the process drains."""

    def __init__(
        self,
        app: Any,
        *,
        reader_timeout: float,
        http: type[asyncio.Protocol],
        limits: ConnectionLimits | None = None,
        draining: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> None:
        super().__init__(app, http=http, ws="none", **options)
        self.reader_timeout, self.draining = reader_timeout, draining
        self.limits = limits or ConnectionLimits()
        self.waiting = Waiting(self.limits)
        self.unread = UnreadBodies(self.limits.unread_bytes)


_PIECE = 16 * KIB
"""The parser is fed so much at a time: what it keeps of a head is looked at in between."""


class _HeadTooLarge(Exception):
    """The head of a request, or its trailers, outgrow a limit; the message says which."""


class _TooManyPipelined(Exception):
    """More requests came in one piece than wait behind the one that is answered."""


class _TooMuchUnread(Exception):
    """The bodies of requests that wait for their turn take too much memory."""


class BoundedConnection(HttpToolsProtocol):
    """A connection that refuses heads which are too large, too slow or too many."""

    config: ServerConfig
    _timer: asyncio.TimerHandle | None = None
    """For the head that is awaited, or for the rest of a body that no handler reads."""
    _in_body = False
    """True while a head is complete and its body is not."""
    _refused = False
    """True once the connection was refused; further bytes are dropped."""
    _head = 0
    _lines = 0
    _silent = 0
    """Bytes since a body's last byte, or since the head began: also of chunk extensions and trailers."""
    _muted = False
    """True while the parser is fed a head that was read before."""
    _rest: int | None = None
    """Bytes that are still read of a body whose request was answered; None before that."""
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.config.waiting.enter(self)
        self._await_head()
        if not self.config.waiting.make_room(len(self.connections), self):
            self._refuse(503, "This API process has no connection free. Retry shortly.", "too_many_connections", 1.0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.config.waiting.leave(self)
        if self._answering is not None and not self._answering.response_complete:
            # Uvicorn tells the newest request only, and others may be piped behind this one.
            client_of(self._answering.scope).leave()
        for cycle, _ in self.pipeline:
            client_of(cycle.scope).leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refused:
            self._drop(len(data))
            return
        if not self._in_body and self._timer is None:
            self._await_head()
        try:
            for start in range(0, len(data), _PIECE):
                self._feed(data[start : start + _PIECE])
        except (httptools.HttpParserError, _HeadTooLarge) as error:
            self._not_parsed(error)
            return
        if self._rest is not None:
            self._drop(len(data))

    def _feed(self, data: bytes) -> None:
        self._silent += len(data)
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess] (it is None after the end alone)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_with_http(data[upgrade.args[0] :])
        if self._silent > self.config.limits.head_bytes:
            raise _HeadTooLarge(self._too_large)
        if self._silent and not self._in_body:
            self.config.waiting.hold(self, self._silent)

    def _go_on_with_http(self, rest: bytes) -> None:
        """No protocol but HTTP/1.1 is spoken: a request that asks for another one is answered as if it had not.

        httptools would take its body for data of that protocol; a new parser is told of the body alone.
        """
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if framing := self._framing:
            self._muted = True  # until its headers are complete
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        if rest:
            self._feed(rest)

    @property
    def _framing(self) -> bytes:
        """The header lines that say where the body ends."""
        names = (b"content-length", b"transfer-encoding")
        return b"".join(b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in names)

    def _not_parsed(self, error: Exception) -> None:
        cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
        if isinstance(cause, _HeadTooLarge):
            self._refuse(431, str(cause), "request_header_fields_too_large")
        elif isinstance(cause, _TooManyPipelined):
            self._stop_reading()
        elif isinstance(cause, _TooMuchUnread):
            self._refuse(
                429,
                "The bodies of requests that wait take all of the memory that this API process has for them. Retry "
                "shortly, or use another API process.",
                "too_many_waiting",
                1.0,
            )
        else:
            self._refuse(
                400, "This is no HTTP/1.1 request that can be read. Check the client's request.", "bad_request"
            )

    def on_message_begin(self) -> None:
        if self._muted:
            return
        super().on_message_begin()
        self._head = self._lines = 0

    def on_url(self, url: bytes) -> None:
        if self._muted:
            return
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._muted:
            return
        self._lines += 1
        self._count_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count_head(self, size: int) -> None:
        limits = self.config.limits
        self._head += size
        if self._head > limits.head_bytes:
            raise _HeadTooLarge(self._too_large)
        if self._lines > limits.head_lines:
            raise _HeadTooLarge(
                f"The request has more than {limits.head_lines} header lines, which is the most that are read. "
                "Send fewer."
            )

    @property
    def _too_large(self) -> str:
        return (
            f"The request's headers are larger than the {self.config.limits.head_bytes // KIB} KiB that are read. "
            "Send fewer or shorter ones; text belongs into the body."
        )

    def on_headers_complete(self) -> None:
        if self._muted:
            self._muted = False
            return
        self._silent, self._in_body = 0, True
        self._stop_timer()
        self.config.waiting.leave(self)
        if len(self.pipeline) >= self.config.limits.pipelined:
            raise _TooManyPipelined
        client = Client(self.config.unread, transport=self.transport)
        set_client(self.scope, client)
        super().on_headers_complete()
        client.cycle = weakref.ref(self.cycle)
        if self.config.draining():
            self.close_after_answer()

    def on_body(self, body: bytes) -> None:
        self._silent = 0
        super().on_body(body)
        if not client_of(self.cycle.scope).receive(len(body)):
            raise _TooMuchUnread

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing:
            return
        self._silent, self._in_body = 0, False
        super().on_message_complete()
        if self._rest is not None:  # the answer has been sent, and the connection is whole again
            self._rest = None
            self._stop_timer()
            self.config.waiting.enter(self)
            self._await_head()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._busy:
            return
        if self._in_body:
            self._unset_keepalive_if_required()
            self._rest = self.config.limits.rest_bytes
            self._stop_timer()
            self._timer = self.loop.call_later(self.config.limits.rest_timeout, self.transport.close)
        else:
            self.config.waiting.enter(self)

    @property
    def _busy(self) -> bool:
        """True while a request is being answered."""
        return self._answering is not None and not self._answering.response_complete

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.config.limits.head_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._busy:
            self._await_head()  # a second request may wait unread behind the first
            return
        self._timer = None
        seconds = f"{self.config.limits.head_timeout:g}"
        self._refuse(
            408, f"The request's headers did not come within {seconds} s. Send them at once.", "request_timeout"
        )

    def _refuse(self, status: int, message: str, code: str, retry_after: float | None = None) -> None:
        """Answer and close; no answer where one is under way, or where nothing was asked."""
        self._refused, self._rest = True, self.config.limits.rest_bytes
        self._stop_timer()
        self.config.waiting.leave(self)
        log.info("a connection is refused", action="refuse_connection", status=status, code=code, client=self.client)
        if self._busy and not self._give_up_body():
            self._stop_reading()
            return
        if status == 408 and self._silent == 0:
            self.transport.close()
            return
        self.transport.write(refusal_bytes(self, status, message, code, retry_after))
        if status == 503:
            self.transport.close()
            return
        self.config.waiting.enter(self)  # it gives way to others
        # The rest is read for a moment: closing with unread bytes would reset the connection under the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(self.config.limits.rest_timeout, self.transport.abort)

    def _give_up_body(self) -> bool:
        """Tell the handler that its body ends here, unless it has answered. False: an answer is under way."""
        if not self._in_body or self._answering is not self.cycle or self.cycle.response_started:
            return False
        client_of(self.cycle.scope).leave()
        return True

    def _stop_reading(self) -> None:
        """End after the answers that were asked for; what else has come is not looked at."""
        self._refused, self._rest = True, self.config.limits.rest_bytes
        self.flow.pause_reading()
        self.close_after_answer()

    def close_after_answer(self) -> None:
        """Tell the client, where the answer has not begun: kept alive, it would come to a process that has ended."""
        if self.cycle is not None:  # pyright: ignore[reportUnnecessaryComparison] (before the first request it is)
            self.cycle.keep_alive = False

    def abort(self) -> None:
        """End the connection at once; what waits in its buffer is dropped."""
        self.transport.abort()

    def _drop(self, size: int) -> None:
        self._rest = (self._rest or 0) - size
        if self._rest <= 0:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ClientConnection(BoundedConnection):
    """Cuts a client that takes nothing for `reader_timeout` seconds while data waits in the transport's buffer."""

    _looking: asyncio.TimerHandle | None = None
    _left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Linux counts from the first byte that the client leaves in the kernel, which this process does not see;
            # it finds a host that vanished, too. Elsewhere the count below begins when the kernel takes no more.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._patience * 1000))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_looking()
        if isinstance(exc, OSError) and exc.errno == errno.ETIMEDOUT:
            self._stalled()
        super().connection_lost(exc)

    @property
    def _patience(self) -> float:
        return self.config.reader_timeout

    def _look(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self._looking = self.loop.call_later(self._patience, self._judge)

    def _judge(self) -> None:
        if self.transport.get_write_buffer_size() < self._left:
            self._look()  # slow, but it reads
            return
        self._stalled()
        self.abort()

    def _stalled(self) -> None:
        log.warning(
            "a client takes nothing and is cut", action="cut_reader", client=self.client, waiting_bytes=self._left
        )
        cycle: Any = self.cycle
        if cycle is not None:
            client_of(cycle.scope).stalled = True

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
