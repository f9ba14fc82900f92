"""Clients' connections: how they are accepted, what bounds they have, and whether the client is still there.

Heads, header lines, trailers, pipelined requests and their time are bounded; uvicorn and httptools bound none of them.
A limit is checked before the parser keeps what is beyond it. Where too many connections are open, one closes that has
not sent the whole head of a request. A reader that stalls is cut, so that it holds neither memory nor a worker for
ever.

uvloop accepts one connection an iteration of the event loop, so that a new one waits for as many iterations as
connections came before it. Clients that connect and leave fill the kernel's queue, which then drops the first packets
of others: these come again after a second. Here all that wait are accepted in each iteration, one whose client left
while it waited is closed before anything is made for it, and the addresses from which connections come take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httptools
import structlog
import uvicorn

from api.http.bodies import KIB, MIB
from api.http.errors import ClientDisconnected, problem, refusal_bytes
from api.http.turns import Turn
from api.http.uvicorn_hooks import BodyWriter, HttpConnection, RequestResponseCycle
from api.http.websocket import GOING_AWAY, NORMAL, UNEXPECTED, WebSocket, accept

log = structlog.stdlib.get_logger(__name__)

_CLIENT_KEY = "furrow.client"
_ESTABLISHED = 1
"""TCP's state of a connection that neither side has closed (Linux, include/net/tcp_states.h)."""


@dataclass(eq=False, slots=True)
class UnreadBodies:
    """Bytes of bodies whose requests wait for their turn."""

    limit: int
    size: int = 0


@dataclass(eq=False, slots=True)
class Client:
    """The client of one request, in its scope: whether it has left, and what it sent that nobody has read."""

    unread: UnreadBodies | None = None
    """The account of this body's bytes; None once the request is handled."""
    unread_bytes: int = 0
    disconnected: bool = False
    """True once the connection is gone before the end of the answer."""
    stalled: bool = False
    """True once the connection was cut because the client read nothing."""
    transport: asyncio.BaseTransport | None = None
    cycle: weakref.ref[RequestResponseCycle] | None = None
    """Uvicorn's handling of the request, which holds its scope, and so this client."""
    turn: Turn | None = None
    """The turn in which the request is admitted; None in a server without turns."""
    _on_leave: Callable[[], object] | None = None

    def has_left(self) -> bool:
        """True if the client has left, also where the event loop has not come to it yet."""
        if not self.disconnected and self.transport is not None and not self.transport.is_closing():
            connection = self.transport.get_extra_info("socket")
            if connection is not None and client_left(connection):
                self.leave()
        return self.disconnected

    def body_writer(self) -> BodyWriter | None:
        """Writes parts of the answer that has begun; None where the server has no such way."""
        cycle = self.cycle() if self.cycle is not None else None
        return BodyWriter.of(cycle) if cycle is not None else None

    def receive(self, size: int) -> bool:
        """Count bytes of a body; False where requests that wait hold too many."""
        if self.unread is None:
            return True
        self.unread_bytes += size
        self.unread.size += size
        return self.unread.size <= self.unread.limit

    def begin(self) -> None:
        """The request is handled from now on, and its body is read."""
        if self.unread is not None:
            self.unread.size -= self.unread_bytes
            self.unread = None

    def leave(self) -> None:
        """Called where the connection is gone, or found to be."""
        self.disconnected = True
        cycle = self.cycle() if self.cycle is not None else None
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.begin()
        if self._on_leave is not None:
            self._on_leave()

    @contextmanager
    def watched(self, wake: Callable[[], object]) -> Generator[None]:
        """Calls `wake` when the client leaves; at once where it has left."""
        self._on_leave = wake
        if self.disconnected:
            wake()
        try:
            yield
        finally:
            self._on_leave = None

    async def turn_again(self) -> None:
        """Wait for the tenant's turn, where the first one ended because the body was waited for.

        Raises ClientDisconnected.
        """
        if self.turn is None:
            return
        try:
            await self.turn.again(self.watched)
        except asyncio.CancelledError:
            if self.disconnected:
                raise ClientDisconnected from None
            raise

    def admitted(self) -> None:
        """The work of admission is done: what follows is not charged to it."""
        self.turn = None


def client_of(scope: Any) -> Client:
    """The client of a request; one that never leaves where the server tells nothing of it."""
    client = scope.get(_CLIENT_KEY)
    if client is None:
        client = scope[_CLIENT_KEY] = Client()
    return client


def set_client(scope: Any, client: Client) -> None:
    """Called by the connection, before the request is handled."""
    scope[_CLIENT_KEY] = client


def client_left(connection: socket.socket) -> bool:
    """True if the client has closed the connection; False where the system does not tell."""
    if not hasattr(socket, "TCP_INFO") or connection.family == socket.AF_UNIX:
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    except OSError:
        return True


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
    """Bytes of that rest that are read."""


class Closable(Protocol):
    def abort(self) -> None: ...


class IdleConnections:
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


@dataclass(frozen=True, slots=True)
class Upgrade:
    """A request to change to WebSocket: its scope, as of a request by HTTP, and whether the process drains."""

    scope: dict[str, Any]
    draining: Callable[[], bool]


class Sockets(Protocol):
    """The handlers of WebSockets."""

    def takes(self, path: str) -> bool:
        """True if there is one at this path."""
        ...

    def most_bytes(self) -> int:
        """Bytes of the largest message that is taken."""
        ...

    async def admit(self, upgrade: Upgrade) -> None:
        """Raise the error with which a handshake is refused."""
        ...

    async def serve(self, upgrade: Upgrade, socket: WebSocket) -> None:
        """Serve a connection until it closes."""
        ...


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
        sockets: Sockets | None = None,
        **options: Any,
    ) -> None:
        super().__init__(app, http=http, ws="none", **options)
        self.reader_timeout = reader_timeout
        self.draining = draining
        self.sockets = sockets
        self.limits = limits or ConnectionLimits()
        self.waiting = IdleConnections(self.limits)
        self.unread = UnreadBodies(self.limits.unread_bytes)


_PIECE = 16 * KIB
"""The parser is fed so much at a time: what it keeps of a head is looked at in between."""


class _HeadTooLarge(Exception):
    """The head of a request, or its trailers, outgrow a limit; the message says which."""


class _TooManyPipelined(Exception):
    """More requests came in one piece than wait behind the one that is answered."""


class _TooMuchUnread(Exception):
    """The bodies of requests that wait for their turn take too much memory."""


class BoundedConnection(HttpConnection):
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
    _socket: WebSocket | None = None
    """The messages of a connection that changed to WebSocket; None before."""

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
        if self._socket is not None:
            self._socket.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.feed(data)
            return
        self.stop_idle_timer()
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
        if self._socket is not None:
            self._socket.feed(data)
            return
        self._silent += len(data)
        try:
            self.parser.feed_data(data)  # pyright: ignore[reportOptionalMemberAccess] (it is None after the end alone)
        except httptools.HttpParserUpgrade as upgrade:
            rest = data[upgrade.args[0] :]
            if self.takes_upgrade():
                self._open_socket(rest)
                return
            self._go_on_with_http(rest)
        if self._silent > self.config.limits.head_bytes:
            raise _HeadTooLarge(self._too_large)
        if self._silent and not self._in_body:
            self.config.waiting.hold(self, self._silent)

    def _go_on_with_http(self, rest: bytes) -> None:
        """HTTP/1.1 is spoken: a request that asks for another protocol is answered as if it had not.

        httptools would take its body for data of that protocol; a new parser is told of the body alone.
        """
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if framing := self._framing:
            self._muted = True  # until its headers are complete
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        if rest:
            self._feed(rest)

    def takes_upgrade(self) -> bool:
        """True for a request, alone on its connection, that asks for a WebSocket where there is one."""
        sockets = self.config.sockets
        if sockets is None or self.scope["method"] != "GET" or self.upgrade_protocol != b"websocket":
            return False
        return not (self._framing or self._busy or self.pipeline) and sockets.takes(self._path)

    @property
    def _path(self) -> str:
        return (httptools.parse_url(self.url).path or b"").decode("latin-1")

    def _open_socket(self, rest: bytes) -> None:
        """Change to WebSocket; `rest` is what came behind the request."""
        self._in_body = False
        self.stop_idle_timer()
        handshake = accept(dict(self.headers))
        sockets = self.config.sockets
        if handshake is None or sockets is None:
            text = "The WebSocket handshake is not understood: send Sec-WebSocket-Key and Sec-WebSocket-Version: 13."
            self._refuse(400, text, "bad_request")
            return
        upgrade = Upgrade({**self.scope, "path": self._path, "state": self.app_state.copy()}, self.config.draining)
        self._socket = WebSocket(self, self.config.unread, sockets.most_bytes)
        task = self.loop.create_task(self._serve_socket(sockets, upgrade, self._socket, handshake))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        if rest:
            self._socket.feed(rest)

    async def _serve_socket(self, sockets: Sockets, upgrade: Upgrade, socket: WebSocket, handshake: bytes) -> None:
        try:
            await sockets.admit(upgrade)
        except Exception as error:
            refusal = problem(error)
            detail = refusal.body.error
            self.write(refusal_bytes(self, refusal.status, detail.message, detail.code or "", refusal.retry_after))
            socket.lost()
            self.end()
            return
        self.write(handshake)
        try:
            await sockets.serve(upgrade, socket)
        except Exception:
            log.exception("a WebSocket ended unexpectedly", action="websocket")
            socket.close(UNEXPECTED)
        finally:
            socket.close(NORMAL)

    # --- what a WebSocket asks of its connection ---

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    async def drain(self) -> None:
        await self.flow.drain()

    @property
    def is_full(self) -> bool:
        return self.flow.write_paused

    def pause(self) -> None:
        self.flow.pause_reading()

    def resume(self) -> None:
        self.flow.resume_reading()

    def end(self) -> None:
        self.transport.close()

    def waits(self, waiting: bool) -> None:
        if waiting:
            self.config.waiting.enter(self)
        else:
            self.config.waiting.leave(self)

    def shutdown(self) -> None:
        """As uvicorn's; a WebSocket ends once it waits for a message."""
        if self._socket is None:
            super().shutdown()
        else:
            self.close_after_answer()

    # --- HTTP ---

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
        self._silent = 0
        self._in_body = True
        self._stop_timer()
        self.config.waiting.leave(self)
        if len(self.pipeline) >= self.config.limits.pipelined:
            raise _TooManyPipelined
        client = Client(self.config.unread, transport=self.transport)
        set_client(self.scope, client)
        super().on_headers_complete()
        if self.parser.should_upgrade() and self.takes_upgrade():  # pyright: ignore[reportOptionalMemberAccess]
            return
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
        self._silent = 0
        self._in_body = False
        super().on_message_complete()
        if self._rest is not None:  # the answer has been sent, and the connection is whole again
            self._rest = None
            self._stop_timer()
            self.config.waiting.enter(self)
            self._await_head()

    def begin_answer(self, cycle: RequestResponseCycle) -> None:
        self._answering = cycle

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() or self._busy:
            return
        if self._in_body:
            self.stop_idle_timer()
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
        self._refused = True
        self._rest = self.config.limits.rest_bytes
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
        """End the connection after the pending answers; further requests are not read."""
        self._refused = True
        self._rest = self.config.limits.rest_bytes
        self.flow.pause_reading()
        self.close_after_answer()

    def close_after_answer(self) -> None:
        """Tell the client, where the answer has not begun: kept alive, it would come to a process that has ended."""
        if self._socket is not None and self._socket.waiting:
            self._socket.close(GOING_AWAY, "this API process is shutting down")
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


_HANDED_AT_ONCE = 4
"""Connections that are handed over in one iteration of the event loop; each takes 0.3 ms of it, then or soon after."""
_ACCEPTED_AT_ONCE = 128
"""Connections that are taken from the kernel in one iteration; each takes about 0.02 ms."""
_MOST_WAITING = 4096
"""Accepted connections that are not handed over yet; further ones wait in the kernel's queue."""
_ACCEPT_AGAIN_S = 0.5
"""After accepting failed, because there are too many open files for example."""


class Acceptor:
    """Accepts the connections of one listening socket. It takes the place of an asyncio server."""

    def __init__(self, listening: socket.socket, protocol_factory: Callable[[], asyncio.Protocol]) -> None:
        """`listening` must not block; it is closed by `close`."""
        self._listening = listening
        self._protocol_factory = protocol_factory
        self._loop = asyncio.get_running_loop()
        self._accepted = OrderedDict[str, deque[socket.socket]]()
        """By the client's address; the address whose turn is next is the first."""
        self._waiting = 0
        """Connections in these queues."""
        self._making = set[asyncio.Task[object]]()
        self._closed = False
        self._loop.add_reader(listening, self._accept)

    @classmethod
    def instead_of(cls, server: asyncio.Server, protocol_factory: Callable[[], asyncio.Protocol]) -> list[Acceptor]:
        """Acceptors of the server's sockets; the server is closed, and no connection is lost."""
        listening = [socket.socket(fileno=os.dup(listener.fileno())) for listener in server.sockets]
        server.close()
        for listener in listening:
            listener.setblocking(False)
        return [cls(listener, protocol_factory) for listener in listening]

    def close(self) -> None:
        """Accept no more connections. Those that were accepted are handed over."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listening)
            self._listening.close()

    async def wait_closed(self) -> None:
        """As of an asyncio server."""

    def _accept(self) -> None:
        if not self._waiting:
            self._loop.call_soon(self._hand_over)
        for _ in range(min(_ACCEPTED_AT_ONCE, _MOST_WAITING - self._waiting)):
            try:
                connection, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("connections can't be accepted", action="accept", error=str(error))
                self._pause(_ACCEPT_AGAIN_S)
                return
            self._accepted.setdefault(address_of(peer), deque()).append(connection)
            self._waiting += 1
        if self._waiting >= _MOST_WAITING:
            self._pause(0.0)

    def _next(self) -> socket.socket:
        """The oldest connection of the address whose turn it is."""
        address, connections = self._accepted.popitem(last=False)
        connection = connections.popleft()
        if connections:
            self._accepted[address] = connections
        self._waiting -= 1
        return connection

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._closed:
            return
        if self._waiting < _MOST_WAITING:
            self._loop.add_reader(self._listening, self._accept)
        else:
            self._loop.call_soon(self._resume)

    def _hand_over(self) -> None:
        places = _HANDED_AT_ONCE
        while self._waiting and places:
            connection = self._next()
            if client_left(connection):
                connection.close()
                continue
            places -= 1
            task = self._loop.create_task(self._make(connection))
            self._making.add(task)
            task.add_done_callback(self._making.discard)
        if self._waiting:
            self._loop.call_soon(self._hand_over)

    async def _make(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol_factory, connection)
        except OSError:
            connection.close()  # the client left in this moment


def address_of(peer: object) -> str:
    """The client's address of a TCP connection; "" for a Unix socket."""
    return str(peer[0]) if isinstance(peer, tuple) else ""
