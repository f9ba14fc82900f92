"""Requests of prepared bytes on connections that never block: many of them share one process and one selector."""

from __future__ import annotations

import json
import re
import selectors
import socket

from ops.harness.client import CHAT

_RECEIVE = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_IP_BIND_ADDRESS_NO_PORT = 24
"""Linux, include/uapi/linux/in.h; a name of Python's `socket` from 3.12 on."""
_LAST_CHUNK = b"0\r\n\r\n"

Address = tuple[str, int]


def chat(
    address: Address, model: str, number: int, tokens: int, *, stream: bool, key: str = "", **fields: object
) -> bytes:
    """A request for `tokens` tokens whose message ends with `number`, as `ops.bench.fanout.leaders.number_of` reads.

    `key` is a bearer token, "" for none; `fields` are further ones of the body.
    """
    messages = [{"role": "user", "content": f"stream {number}"}]
    fields = {"model": model, "messages": messages, "stream": stream, **fields, "max_tokens": tokens}
    body = json.dumps(fields).encode()
    bearer = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n{bearer}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(address: Address, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n\r\n".encode()


def dial(address: Address, source: str = "") -> socket.socket:
    """A connection that may still be under way: a full accept queue delays nobody else. `source`: its own address."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if source:
        # The port is chosen when it connects: a bind would look for one that no connection of the host had lately.
        connection.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        connection.bind((source, 0))
    connection.connect_ex(address)
    return connection


class RawAnswer:
    """An answer as its pieces come. `status` is 0 until the head is there; `data` is head and body."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.status = 0
        self.whole = False
        self._end: int | None = None
        """Bytes of head and body where the head has a length; None for chunks."""

    @property
    def body(self) -> bytes:
        return bytes(self.data.partition(b"\r\n\r\n")[2])

    def feed(self, piece: bytes) -> None:
        self.data += piece
        if not self.status:
            head = self.data.find(b"\r\n\r\n")
            if head < 0:
                return
            self.status = int(self.data[9:12])
            length = _LENGTH.search(self.data, 0, head)
            self._end = head + 4 + int(length[1]) if length is not None else None
        if self._end is not None:
            self.whole = len(self.data) >= self._end
        else:
            self.whole = self.data.endswith(_LAST_CHUNK)


class HttpConnection:
    """A client with one connection and at most one request under way, registered at `selector` with itself as data.

    The connection is gone, and `connected` False, where the server has ended it: then no answer comes.
    """

    def __init__(self, selector: selectors.BaseSelector, address: Address, source: str = "") -> None:
        self._selector = selector
        self._address = address
        self._source = source
        self._socket: socket.socket | None = None
        self._awaits = selectors.EVENT_READ
        self._request = b""
        self.answer = RawAnswer()

    @property
    def connected(self) -> bool:
        return self._socket is not None

    def send(self, request: bytes) -> None:
        """Begin a request, on a new connection where there is none. Raises OSError without a free local port."""
        self.answer, self._request = RawAnswer(), request
        if self._socket is None:
            self._socket = dial(self._address, self._source)
            self._awaits = selectors.EVENT_READ
            self._selector.register(self._socket, self._awaits, self)
        self._transmit()

    def proceed(self) -> bytes | None:
        """Send or receive what is possible now. The piece of the answer that came; None at the connection's end."""
        assert self._socket is not None
        if self._request:
            return self._transmit()
        try:
            piece = self._socket.recv(_RECEIVE)
        except BlockingIOError:
            return b""
        except OSError:
            piece = b""
        if not piece:
            self.close()
            return None
        self.answer.feed(piece)
        return piece

    def close(self) -> None:
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    def _transmit(self) -> bytes | None:
        """Send the request: a few hundred bytes, which a connection takes in one piece once it is there."""
        assert self._socket is not None
        awaits = selectors.EVENT_READ
        try:
            self._socket.sendall(self._request)
            self._request = b""
        except BlockingIOError:
            awaits = selectors.EVENT_WRITE
        except OSError:
            self.close()
            return None
        if awaits != self._awaits:
            self._awaits = awaits
            self._selector.modify(self._socket, awaits, self)
        return b""


def close_all(selector: selectors.BaseSelector) -> None:
    """Close every connection of the exchanges at `selector`."""
    for key in list(selector.get_map().values()):
        key.data.close()
