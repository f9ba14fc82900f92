"""A WebSocket client of tests, with a blocking socket: it can break the protocol too."""

from __future__ import annotations

import json
import os
import socket
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""RFC 6455 has this pair as its example."""


def frame(payload: bytes, opcode: int = TEXT, *, final: bool = True, masked: bool = True) -> bytes:
    size = len(payload)
    head = bytes([(0x80 if final else 0) | opcode])
    flag = 0x80 if masked else 0
    if size < 126:
        head += bytes([flag | size])
    elif size < 1 << 16:
        head += bytes([flag | 126]) + size.to_bytes(2)
    else:
        head += bytes([flag | 127]) + size.to_bytes(8)
    if not masked:
        return head + payload
    mask = os.urandom(4)
    return head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))


class SocketClient:
    """One connection; `status` and `head` are those of the handshake's answer."""

    def __init__(self, url: str, path: str = "/v1/responses", **headers: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), 40)
        lines = {
            "host": parts.netloc,
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-key": KEY,
            "sec-websocket-version": "13",
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        told = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        self.socket.sendall(f"GET {path} HTTP/1.1\r\n{told}\r\n".encode())
        self.data = b""
        while b"\r\n\r\n" not in self.data:
            self.data += self._more()
        head, _, self.data = self.data.partition(b"\r\n\r\n")
        self.head = head.decode()
        self.status = int(self.head.split()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()

    def _more(self) -> bytes:
        data = self.socket.recv(65536)
        if not data:
            raise EOFError
        return data

    def _take(self, size: int) -> bytes:
        while len(self.data) < size:
            self.data += self._more()
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def frame(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame."""
        first, size = self._take(2)
        if size >= 126:
            size = int.from_bytes(self._take(2 if size == 126 else 8))
        return first & 15, self._take(size)

    def send(self, **message: Any) -> None:
        self.socket.sendall(frame(json.dumps(message).encode()))

    def event(self) -> dict[str, Any]:
        """The next message."""
        while True:
            opcode, payload = self.frame()
            if opcode == TEXT:
                return json.loads(payload)
            assert opcode == PING, (opcode, payload)

    def response(self, **body: Any) -> list[dict[str, Any]]:
        """The events of one response, up to its last one or an error."""
        self.send(type="response.create", **body)
        events = [self.event()]
        while events[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
            events.append(self.event())
        return events

    def closed(self) -> int:
        """The code with which the server closes the connection."""
        while True:
            opcode, payload = self.frame()
            if opcode == CLOSE:
                return int.from_bytes(payload[:2])
