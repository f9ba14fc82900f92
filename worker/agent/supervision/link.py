"""The supervisor's end of the socket to its agent: it never blocks, whatever the agent does."""

from __future__ import annotations

import selectors
import socket
from typing import Any

from worker.agent.supervision.wire import CHUNK_BYTES, LineBuffer, encode_line


class Link:
    """Sends messages in order, and cuts what arrives into lines."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.socket, self.open = link, True
        self._out, self._lines = bytearray(), LineBuffer()

    @property
    def interest(self) -> int:
        """The selector's events to wait for."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._out else 0)

    def send(self, message: dict[str, Any]) -> None:
        """Send `message` once the agent has taken what went before."""
        if self.open:
            self._out += encode_line(message)
            self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                del self._out[: self.socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:  # the agent has gone; what it had sent is still to be read
            self._out.clear()

    def receive(self) -> list[bytes]:
        """The lines that have arrived since the last call. A line without its end waits for it."""
        lines: list[bytes] = []
        while self.open:
            try:
                data = self.socket.recv(CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            lines += self._lines.feed(data)
            self.open = bool(data)
        return lines

    def close(self) -> None:
        self.open = False
        self.socket.close()
