"""Messages between a host's supervisor and its agent: one JSON object a line, over a socket pair.

The agent's end of the pair is its standard input. The agent sends requests (`op`), the supervisor answers and events
(`event`):

| message | fields |
|---|---|
| op `alive` | |
| op `spawn` | id, argv, env, tag, ending, channel: whether the child's standard input is a socket to the supervisor |
| op `tell` | id, pid, line: send the line to the child's channel |
| op `fork` | id, pid, line, tag, ending: the child forks; the new process gets the line and is a child like any other |
| op `signal` | pid, number |
| op `forget` | pid: the agent has acted on the exit |
| op `keep` | key, value: state that the next agent gets; null removes it |
| event `welcome` | children, kept: first message to each new agent |
| event `answer` | id, pid or error |
| event `exit` | pid, status |
| event `said` | pid, line: what a child wrote to its channel |
| event `stop` | the host is to leave the farm: end the ranks in order, then exit |

An agent may be newer than its supervisor: messages are added, never changed. One that the supervisor does not
understand is refused with an answer, and harms nothing.

Only the standard library is imported here: the supervisor loads this file too.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
from typing import Any, Final, NamedTuple

CHUNK_BYTES = 1 << 16

Tag = dict[str, Any]
"""The agent's label of a child. The supervisor stores it, and reads only its `kind`."""


class Ending(NamedTuple):
    """The order and way in which the supervisor ends a child without an agent: children with a lower `order` end
    first."""

    order: int = 0
    number: int = signal.SIGTERM


AT_ONCE: Final = Ending(0, signal.SIGKILL)


def encode_line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineBuffer:
    """Cuts a stream of bytes into lines. The last line is kept until its end arrives."""

    def __init__(self) -> None:
        self._partial_line = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return lines


def take_channel() -> socket.socket:
    """The socket that is this process's standard input, which is /dev/null afterwards. Raises OSError if it is no
    socket."""
    channel = socket.socket(fileno=os.dup(0))
    channel.getpeername()  # raises for anything that is no connected socket
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    return channel


# The supervisor's end of the socket to its agent: it never blocks, whatever the agent does.


class AgentLink:
    """Sends messages in order, and cuts what arrives into lines."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.socket = link
        self.open = True
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
