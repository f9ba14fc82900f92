"""Processes that a child forks for the supervisor, from the request to the child that is supervised like any other.

The supervisor sends one end of a socket pair to the child. The new process writes its pid to it and waits there for
one line. It ends by itself where the line does not come, so that no process runs that the supervisor does not know.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worker.agent.supervision.children import Children
from worker.agent.supervision.wire import Ending, Tag

FORK = "fork"
"""The line that asks a child to fork; the socket comes with it."""
FORK_WITHIN_S = 5.0
"""A fork takes milliseconds; the agent waits meanwhile."""
PID_BYTES = 64


@dataclass
class _Fork:
    """A request; `due` is the time of the monotonic clock at which it has failed."""

    number: int
    pid: int
    line: str
    tag: Tag
    ending: Ending
    due: float


class Forks:
    """Requests of the agent that are under way; `send` takes the answers, and exits that came before them."""

    def __init__(self, children: Children, send: Callable[[dict[str, Any]], None]) -> None:
        self._children = children
        self._send = send
        self._under_way: dict[socket.socket, _Fork] = {}
        self._reaped: dict[int, int] = {}
        """Exit statuses of processes that were reaped while forks were under way, and were no children yet."""

    def begin(self, request: dict[str, Any]) -> None:
        """Ask the child to fork; `hear` or `expire` answers. Raises OSError if the child can't be asked."""
        number, pid, line, tag, ending = (request[name] for name in ("id", "pid", "line", "tag", "ending"))
        fork = _Fork(number, pid, line, tag, Ending(*ending), time.monotonic() + FORK_WITHIN_S)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._children.tell(pid, FORK, theirs)
        except OSError:
            ours.close()
            raise
        ours.setblocking(False)
        if not self._under_way:
            self._reaped.clear()
        self._under_way[ours] = fork

    @property
    def sockets(self) -> list[socket.socket]:
        """Those that become readable when a process was forked, or was not."""
        return list(self._under_way)

    def hear(self, link: socket.socket) -> None:
        """Answer the request whose process wrote to `link`, or has closed it."""
        fork = self._under_way.pop(link)
        with link:
            try:
                pid = int(link.recv(PID_BYTES))
                link.sendall(fork.line.encode() + b"\n")
            except (OSError, ValueError):
                self._fail(fork, f"process {fork.pid} forked no process; its log has the reason")
                return
        status = self._reaped.pop(pid, None)
        self._children.add(pid, fork.tag, fork.ending, status)
        self._send({"event": "answer", "id": fork.number, "pid": pid})
        if status is not None:
            self._send({"event": "exit", "pid": pid, "status": status})

    def expire(self, now: float) -> None:
        """Answer the requests that have taken too long."""
        for link, fork in list(self._under_way.items()):
            if now > fork.due:
                del self._under_way[link]
                link.close()
                self._fail(fork, f"process {fork.pid} did not fork in {FORK_WITHIN_S:g} s")

    def abort(self) -> None:
        """End what is under way: the agent that asked is gone."""
        for link in self._under_way:
            link.close()
        self._under_way.clear()

    def reaped(self, pid: int, status: int) -> None:
        """Note the exit of a process that is no child: it may have been forked, and its pid not been read."""
        if self._under_way:
            self._reaped[pid] = status

    def _fail(self, fork: _Fork, error: str) -> None:
        self._send({"event": "answer", "id": fork.number, "error": error})
