"""Raw HTTP for attacks: what no client library would send."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 30.0
_PIECE = 65_536


@dataclass(frozen=True, slots=True)
class Target:
    """The API process under attack. `key` is one of the farm's, `spare` a client number that no polite stream has."""

    host: str
    port: int
    key: str
    spare: int

    def connect(self) -> socket.socket:
        return socket.create_connection((self.host, self.port), timeout=_TIMEOUT_S)

    def head(self, path: str, *lines: str) -> bytes:
        start = f"POST {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
        return (start + "".join(f"{line}\r\n" for line in lines)).encode()

    def post(self, path: str, body: bytes | dict[str, Any], *lines: str) -> int:
        """The status of a request's answer; 0 for none."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.connect() as connection:
            send(connection, self.head(path, f"content-length: {len(content)}", *lines) + b"\r\n" + content)
            return status(connection)

    def get(self, path: str) -> bytes:
        with self.connect() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            return everything(connection)


def send(connection: socket.socket, data: bytes) -> int:
    """As much as the server takes; the bytes that went out."""
    sent = 0
    with suppress(OSError):
        while sent < len(data):
            connection.sendall(data[sent : sent + _PIECE])
            sent += _PIECE
    return min(sent, len(data))


def status(connection: socket.socket) -> int:
    """The status of the answer; 0 where the connection ended without one."""
    got = b""
    with suppress(OSError):
        while len(got) < 12 and (data := connection.recv(_PIECE)):
            got += data
    return int(got[9:12]) if got.startswith(b"HTTP/1.1 ") else 0


def everything(connection: socket.socket) -> bytes:
    """The bytes that come until the connection ends."""
    got = b""
    with suppress(OSError):
        while data := connection.recv(_PIECE):
            got += data
    return got
