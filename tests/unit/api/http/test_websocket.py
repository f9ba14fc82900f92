"""Frames of WebSockets are bounded: memory, sizes and what is read no further, on a recorded transport."""

from __future__ import annotations

import asyncio

from api.http.connection import UnreadBodies
from api.http.websocket import NORMAL, TOO_LARGE, TRY_LATER, WebSocket, accept
from tests.integration.api.socket_client import ACCEPT, CLOSE, KEY, PING, frame


class RecordedTransport:
    def __init__(self) -> None:
        self.written = b""
        self.paused = self.ended = self.is_full = False

    def write(self, data: bytes) -> None:
        self.written += data

    async def drain(self) -> None: ...

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def end(self) -> None:
        self.ended = True

    def waits(self, waiting: bool) -> None: ...


def opened(*, limit: int = 1000, most: int = 100) -> tuple[WebSocket, RecordedTransport, UnreadBodies]:
    transport, memory = RecordedTransport(), UnreadBodies(limit)
    return WebSocket(transport, memory, lambda: most), transport, memory


def code_of(transport: RecordedTransport) -> int:
    """The code of the only frame that was written."""
    assert transport.written[0] == 0x80 | CLOSE and transport.ended
    return int.from_bytes(transport.written[2:4])


def test_the_handshake_of_the_standard() -> None:
    """RFC 6455's example; other versions and keys are not understood."""
    headers = {b"sec-websocket-key": KEY.encode(), b"sec-websocket-version": b"13"}
    assert ACCEPT.encode() in (accept(headers) or b"")
    for name, value in (
        (b"sec-websocket-key", b"!"),
        (b"sec-websocket-key", b"AAAA"),
        (b"sec-websocket-version", b"8"),
    ):
        assert accept(headers | {name: value}) is None


def test_messages_wait_in_bounds() -> None:
    """A few messages wait, then no more are read; each that is taken makes room, and memory is given back."""

    async def run() -> None:
        socket, transport, memory = opened()
        socket.feed(b"".join(frame(b"%d" % number) for number in range(3)))
        assert not transport.paused and memory.size == 3
        socket.feed(frame(b"3"))
        assert transport.paused
        assert [await socket.receive() for _ in range(4)] == ["0", "1", "2", "3"]
        assert not transport.paused and memory.size == 0
        socket.feed(frame(b"x" * 50)[:30])
        assert memory.size == 30
        socket.lost()
        assert await socket.receive() is None and memory.size == 0

    asyncio.run(run())


def test_pings_of_a_client_that_does_not_read_are_not_answered() -> None:
    async def run() -> None:
        socket, transport, _ = opened()
        socket.feed(frame(b"a", PING))
        answered = len(transport.written)
        assert answered
        transport.is_full = True
        socket.feed(frame(b"b", PING) * 1000)
        assert len(transport.written) == answered and not socket.closed

    asyncio.run(run())


def test_what_is_too_large_closes() -> None:
    """One message beyond its limit, whole or in fragments, and messages beyond the memory of all connections."""

    async def run() -> None:
        socket, transport, _ = opened()
        socket.feed(frame(b"x" * 101)[:6])
        assert code_of(transport) == TOO_LARGE
        socket, transport, memory = opened()
        socket.feed(frame(b"x" * 60, final=False) + frame(b"x" * 41, opcode=0))
        assert code_of(transport) == TOO_LARGE and memory.size == 0
        socket, transport, memory = opened(limit=150)
        memory.size = 100  # other connections'
        socket.feed(frame(b"x" * 60)[:55])
        assert code_of(transport) == TRY_LATER and memory.size == 100
        await socket.send(b"late")
        socket.close(NORMAL)
        assert code_of(transport) == TRY_LATER

    asyncio.run(run())


def test_a_goodbye_and_what_follows_it() -> None:
    """The client's code comes back; what it sends after is dropped."""
    socket, transport, _ = opened()
    socket.feed(frame((1000).to_bytes(2), opcode=CLOSE) + frame(b"", opcode=PING))
    assert code_of(transport) == NORMAL and len(transport.written) == 4 and socket.closed
