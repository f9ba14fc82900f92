"""A process that forks ranks: copies of itself that share its pages until one of them writes.

A fork copies one thread and no context of a device, so it is made only while there is neither.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from control.process import die_with_parent
from worker.agent.supervision.children import FORK
from worker.agent.supervision.wire import CHUNK_BYTES, LineBuffer

log = structlog.get_logger()

_DEVICE_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")
"""Prefixes of the files that a process with a context on a GPU has open."""
_ENDED_S = 0.5
"""Time for which a fork waits for threads to end: Python's `join` returns before the kernel's thread is gone."""


def serve_forks(channel: socket.socket, tell: Callable[[str], None]) -> str | None:
    """Fork whenever the supervisor at the other end of `channel` says so; `tell` gets its other lines.

    Returns in each forked process, with the line for it, and in this one with None once the supervisor closes.
    """
    lines = LineBuffer()
    sockets = deque[int]()
    while True:
        try:
            data, received, _, _ = socket.recv_fds(channel, CHUNK_BYTES, 1)
        except ConnectionResetError:  # it closed before it had read all that it was told
            return None
        sockets += received
        if not data:
            return None
        for line in lines.feed(data):
            if line != FORK.encode():
                tell(line.decode())
                continue
            with socket.socket(fileno=sockets.popleft()) as link:
                if reason := reason_against_fork():
                    log.error("no process is forked", reason=reason, action="fork")
                elif _fork():
                    channel.close()
                    return _begin(link)


def reason_against_fork() -> str:
    """The reason why a copy of this process would not work; "" if it would."""
    until = time.monotonic() + _ENDED_S
    while len(threads := _threads()) > 1 and time.monotonic() < until:
        time.sleep(0.002)
    if len(threads) > 1:
        return f"it has {len(threads)} threads ({', '.join(sorted(threads))}), of which a fork copies one"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized, which no forked process can use"
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder's own, which is closed by now
            if (name := str(file.readlink())).startswith(_DEVICE_FILES):
                return f"it has {name} open, which no forked process can use"
    return ""


def _threads() -> list[str]:
    """The name of each thread of this process."""
    names = list[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            names.append((task / "comm").read_text().strip())
    return names


def _fork() -> bool:
    """True in the new process, whose parent is the supervisor: the process in between ends at once."""
    gc.freeze()  # collections of the new process then write to no page that both have
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    between = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0005)
    gc.enable()
    return True


def _begin(link: socket.socket) -> str:
    """Tell the supervisor the pid; the line that it answers. Ends where it does not."""
    die_with_parent()
    try:
        link.sendall(b"%d" % os.getpid())
        line = link.makefile("rb").readline()
    except OSError:
        line = b""
    if not line.endswith(b"\n"):
        os._exit(0)
    return line.decode()
