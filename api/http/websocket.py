"""WebSockets (RFC 6455): the server's side of the handshake, and messages of text on a connection that has changed to
them. Extensions and messages of bytes are not supported.

A client's messages are bounded: each by its size, the messages that wait by their number, and those of all
connections that are not handled yet by the memory of unread bodies.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections import deque
from collections.abc import Callable
from typing import Protocol

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Of RFC 6455: what a server adds to the client's key."""
_KEY_BYTES = 16
_CONTINUATION = 0
_TEXT = 1
_BINARY = 2
_CLOSE = 8
_PING = 9
_PONG = 10
_MOST_CONTROL = 125
_MOST_WAITING = 4
"""Messages that wait to be handled; no more are read until one is."""
_PING_S = 30.0

NORMAL = 1000
GOING_AWAY = 1001
PROTOCOL_ERROR = 1002
NOT_TEXT = 1003
NOT_UTF8 = 1007
TOO_LARGE = 1009
# Codes with which a connection closes.
UNEXPECTED = 1011
TRY_LATER = 1013


class Memory(Protocol):
    """The bytes of messages that are not handled yet, on all connections, and the limit of them."""

    limit: int
    size: int


class SocketTransport(Protocol):
    """The connection that carries a WebSocket."""

    def write(self, data: bytes) -> None: ...

    async def drain(self) -> None: ...

    @property
    def is_full(self) -> bool:
        """True while the client does not take what was written."""
        ...

    def pause(self) -> None:
        """Read no more for now."""
        ...

    def resume(self) -> None: ...

    def end(self) -> None:
        """Close once what was written has been sent."""
        ...

    def waits(self, waiting: bool) -> None:
        """True: the connection waits for a message, and may be closed where others need its place."""
        ...


def accept(headers: dict[bytes, bytes]) -> bytes | None:
    """The response to a handshake; None for one that can't be understood."""
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except (binascii.Error, ValueError):
        is_key = False
    if not is_key or headers.get(b"sec-websocket-version") != b"13":
        return None
    digest = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: " + digest + b"\r\n\r\n"
    )


class WebSocket:
    """The messages of one connection."""

    def __init__(self, transport: SocketTransport, memory: Memory, most: Callable[[], int]) -> None:
        """`most`: bytes of the largest message that is taken."""
        self._transport = transport
        self._memory = memory
        self._most = most
        self._data = bytearray()
        self._parts = bytearray()
        """The fragments of a message that has not come whole."""
        self._begun = False
        """True while fragments of a message are awaited."""
        self._messages: deque[str] = deque()
        self._counted = 0
        """Bytes that count in the memory of all connections."""
        self._arrived = asyncio.Event()
        self.waiting = False
        """True while the next message is awaited."""
        self.closed = False
        """True once the client is gone, or was told to go."""
        self.on_close: Callable[[], object] | None = None

    async def receive(self) -> str | None:
        """The next message; None once the connection is closed."""
        self.waiting = True
        self._transport.waits(True)
        while not self._messages and not self.closed:
            self._arrived.clear()
            try:
                async with asyncio.timeout(_PING_S):
                    await self._arrived.wait()
            except TimeoutError:
                self.ping()  # a client that has vanished is found by it
        self.waiting = False
        self._transport.waits(False)
        if self.closed:
            return None
        message = self._messages.popleft()
        self._count()
        self._transport.resume()
        return message

    async def send(self, text: bytes) -> None:
        """Send a message of UTF-8 text, once the client has taken most of what came before it."""
        if not self.closed:
            self._transport.write(_frame(_TEXT, text))
            await self._transport.drain()

    def ping(self) -> None:
        """Tell proxies and the client that the connection lives."""
        if not self.closed:
            self._transport.write(_frame(_PING, b""))

    def close(self, code: int, reason: str = "") -> None:
        """Say goodbye and end the connection; at most once."""
        if not self.closed:
            self._transport.write(_frame(_CLOSE, code.to_bytes(2) + reason.encode()[: _MOST_CONTROL - 2]))
            self.lost()
            self._transport.end()

    def lost(self) -> None:
        """The connection is gone."""
        self.closed = True
        self._data.clear()
        self._parts.clear()
        self._messages.clear()
        self._count()
        self._arrived.set()
        if self.on_close is not None:
            self.on_close()

    def feed(self, data: bytes) -> None:
        """Bytes of the client."""
        if self.closed:
            return
        self._data += data
        while not self.closed and self._frame_came():
            pass
        self._count()
        if self._memory.size > self._memory.limit:
            self.close(TRY_LATER, "messages that wait take all memory; retry shortly")

    def _count(self) -> None:
        size = len(self._data) + len(self._parts) + sum(len(message) for message in self._messages)
        self._memory.size += size - self._counted
        self._counted = size

    def _frame_came(self) -> bool:
        """Read the next frame; False where it is not whole."""
        data = self._data
        if len(data) < 2:
            return False
        final = data[0] >> 7
        opcode = data[0] & 15
        size = data[1] & 127
        masked = data[1] >> 7
        if data[0] & 0x70 or not masked or (opcode & 8 and (not final or size > _MOST_CONTROL)):
            self.close(PROTOCOL_ERROR, "a frame breaks RFC 6455")
            return False
        extra = {126: 2, 127: 8}.get(size, 0)
        begin = 2 + extra + 4
        if len(data) < begin:
            return False
        if extra:
            size = int.from_bytes(data[2 : 2 + extra])
        if size + len(self._parts) > self._most():
            self.close(TOO_LARGE, f"a message has more than {self._most()} bytes")
            return False
        if len(data) < begin + size:
            return False
        payload = _unmasked(bytes(data[begin : begin + size]), bytes(data[begin - 4 : begin]))
        del data[: begin + size]
        self._take(opcode, payload, final=bool(final))
        return True

    def _take(self, opcode: int, payload: bytes, *, final: bool) -> None:
        if opcode == _CLOSE:
            self.close(int.from_bytes(payload[:2]) if len(payload) >= 2 else NORMAL)
        elif opcode == _PING:
            if not self._transport.is_full:  # answers that nobody reads would take memory without end
                self._transport.write(_frame(_PONG, payload))
        elif opcode == _PONG:
            return
        elif opcode == _BINARY:
            self.close(NOT_TEXT, "send text")
        elif opcode not in (_TEXT, _CONTINUATION) or self._begun != (opcode == _CONTINUATION):
            self.close(PROTOCOL_ERROR, "a frame breaks RFC 6455")
        else:
            self._parts += payload
            self._begun = not final
            if final:
                self._message_came()

    def _message_came(self) -> None:
        try:
            message = self._parts.decode()
        except UnicodeDecodeError:
            self.close(NOT_UTF8, "a message is no UTF-8")
            return
        self._parts.clear()
        self._messages.append(message)
        if len(self._messages) >= _MOST_WAITING:
            self._transport.pause()
        self._arrived.set()


def _frame(opcode: int, payload: bytes) -> bytes:
    """One unmasked frame, the whole message."""
    size = len(payload)
    if size <= _MOST_CONTROL:
        head = bytes([0x80 | opcode, size])
    elif size < 1 << 16:
        head = bytes([0x80 | opcode, 126]) + size.to_bytes(2)
    else:
        head = bytes([0x80 | opcode, 127]) + size.to_bytes(8)
    return head + payload


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    repeated = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload) ^ int.from_bytes(repeated)).to_bytes(size)
