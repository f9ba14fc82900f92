"""The child processes of a host's supervisor: started, forked, signalled, reaped; each exit kept until the agent knows
it; and the order in which all of them end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from worker.agent.supervision.wire import CHUNK_BYTES, Ending, LineBuffer, Tag


@dataclass
class Child:
    """One rank or standby. `status` is the exit status once it has ended, negative for a signal."""

    pid: int
    tag: Tag
    ending: Ending
    channel: socket.socket | None = None
    process: subprocess.Popen[bytes] | None = None
    """None for a process that a standby forked."""
    started: float = field(default_factory=time.time)
    """Seconds since 1970."""
    said: list[str] = field(default_factory=list)
    status: int | None = None
    lines: LineBuffer = field(default_factory=LineBuffer)

    @property
    def is_group(self) -> bool:
        """True if it leads a process group, whose processes end with it: an external engine starts its own."""
        return self.tag.get("kind") == "engine"

    def describe(self) -> dict[str, Any]:
        """The child as a new agent learns of it."""
        return {
            "pid": self.pid,
            "tag": self.tag,
            "started": self.started,
            "status": self.status,
            "said": self.said,
            "channel": self.channel is not None,
        }


class Children:
    """Every child that lives, and every one that ended and was not forgotten yet."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}

    def spawn(self, argv: list[str], env: dict[str, str], tag: Tag, ending: Ending, channel: bool) -> int:
        """Start a process whose parent is this one, for `die_with_parent`. Raises OSError."""
        environment = {**env, "FURROW_PARENT": str(os.getpid())}
        ours = None
        if not channel:
            process = subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL)
        else:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    process = subprocess.Popen(argv, env=environment, stdin=theirs.fileno())
            except OSError:
                ours.close()
                raise
            ours.setblocking(False)
        self._children[process.pid] = Child(process.pid, tag, ending, ours, process)
        return process.pid

    def add(self, pid: int, tag: Tag, ending: Ending, status: int | None) -> None:
        """Take in a process that another child forked; `status` where it has been reaped already."""
        self._children[pid] = Child(pid, tag, ending, status=status)

    def tell(self, pid: int, line: str, *sockets: socket.socket) -> None:
        """Send a line, with sockets, to the child's channel. Raises OSError if it has ended or does not read."""
        child = self._children.get(pid)
        if child is None or child.channel is None:
            raise ProcessLookupError(f"process {pid} has no channel to this supervisor")
        data = line.encode() + b"\n"
        if socket.send_fds(child.channel, [data], [sent.fileno() for sent in sockets]) < len(data):
            raise BlockingIOError(f"process {pid} does not read its channel")

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a child that has not been reaped, so that the pid can't be another process's."""
        child = self._children.get(pid)
        if child is not None and child.status is None:
            with suppress(ProcessLookupError):
                if child.is_group and os.getpgid(pid) == pid:
                    os.killpg(pid, number)
                else:
                    os.kill(pid, number)

    def forget(self, pid: int) -> None:
        child = self._children.get(pid)
        if child is not None and child.status is not None:
            del self._children[pid]

    def ended(self, pid: int, status: int) -> bool:
        """Note an exit that waitpid reported; False if the process was none of these children."""
        child = self._children.get(pid)
        if child is None or child.status is not None:
            return False
        child.status = status
        if child.is_group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if child.process is not None:
            child.process.returncode = status
        if child.channel is not None:
            child.channel.close()
            child.channel = None
        return True

    def channels(self) -> dict[socket.socket, int]:
        """The open channel of each child that has one, with its pid."""
        return {child.channel: pid for pid, child in self._children.items() if child.channel is not None}

    def hear(self, pid: int) -> list[str]:
        """The lines that the child has written to its channel since the last call."""
        child = self._children[pid]
        assert child.channel is not None
        try:
            data = child.channel.recv(CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:  # the child closed its end
            child.channel.close()
            child.channel = None
            return []
        lines = [line.decode(errors="replace") for line in child.lines.feed(data)]
        child.said += lines
        return lines

    def living(self) -> list[Child]:
        return [child for child in self._children.values() if child.status is None]

    def describe(self) -> list[dict[str, Any]]:
        """Every child, ended ones included."""
        return [child.describe() for child in self._children.values()]


# The end of a host's ranks without an agent: in order, each with the signal that was named at its start.


KILL_AFTER_S = 75.0
"""Time for leaders to finish their step and give back their requests before all processes are killed."""


class HostShutdown:
    """Ends all children. `advance` is called again and again until none is left."""

    def __init__(self, children: Children, now: float) -> None:
        self._children = children
        self._limit = now + KILL_AFTER_S
        self._signalled: set[int] = set()

    def advance(self, now: float) -> bool:
        """Signal whoever is next. True once no child lives."""
        living = self._children.living()
        if not living:
            return True
        late = now > self._limit
        first = min(child.ending.order for child in living)
        for child in living:
            pid = child.pid
            if late:
                self._children.signal(pid, signal.SIGKILL)
            elif child.ending.order == first and pid not in self._signalled:
                self._signalled.add(pid)
                self._children.signal(pid, child.ending.number)
        return False


# Processes that a child forks for the supervisor, from the request to the child that is supervised like any other.
#
# The supervisor sends one end of a socket pair to the child. The new process writes its pid to it and waits there for
# one line. It ends by itself where the line does not come, so that no process runs that the supervisor does not know.


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
