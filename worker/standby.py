"""The host's standby, seen from its agent: one process that has imported everything and waits to become a rank.

Nearly all of a respawn is importing torch and transformers. The standby has done that before anything died.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from typing import Literal

import msgspec
import structlog

from control.process import child_environment

log = structlog.get_logger()

RETRY_S = 10.0
"""After a standby that died by itself, before the next."""
READY = b"ready\n"
"""What the standby says when it has imported everything; then it waits for one line, its duty as JSON."""

StandbyState = Literal["off", "starting", "ready"]


def rank_environment(redis_url: str) -> dict[str, str]:
    """The environment with which every rank process begins, a standby too; its duty is what is added for one rank."""
    return child_environment(
        FURROW_REDIS_URL=redis_url,
        # Threads that wait for each other by spinning slow a busy machine's decode down more than tenfold.
        OMP_WAIT_POLICY=os.environ.get("OMP_WAIT_POLICY", "passive"),
    )


class Standby:
    """At most one process. Use from the agent's main thread alone: a child dies with the thread that forked it."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready = False
        self._due = 0.0

    @property
    def state(self) -> StandbyState:
        if self._process is None:
            return "off"
        return "ready" if self._ready else "starting"

    def tend(self, folders: Collection[str], calm: bool) -> None:
        """Note that it is ready, or has died; start one when there is none and the host is `calm`.

        `folders` are those of the models in use, whose code it imports too.
        """
        if self._process is not None and self._process.poll() is not None:
            log.warning("the standby died; the next rank starts without one", pid=self._process.pid)
            self._due = time.monotonic() + RETRY_S
            self._forget()
        if self._channel is not None and not self._ready:
            self._listen(self._channel)
        if self._process is None and calm and time.monotonic() >= self._due:
            self._spawn(folders)

    def take(self, duty: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """Make it the rank that `duty` describes, as environment; None where there is none to take.

        The process is the caller's from then on, to be waited for like any other rank.
        """
        process, channel = self._process, self._channel
        if process is None or channel is None or process.poll() is not None:
            return None
        if not self._ready:
            self._listen(channel)
        if not self._ready:  # it may be far from it, and imports at low priority
            return None
        try:
            channel.sendall(msgspec.json.encode(duty) + b"\n")
        except OSError:  # it died this very moment, which `tend` will find
            return None
        self._forget()
        return process

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    def _spawn(self, folders: Collection[str]) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)  # the agent's turns must never wait for it; a duty fits into the socket's buffer
        command = [sys.executable, "-m", "worker", "standby", str(theirs.fileno()), *folders]
        with theirs:
            self._process = subprocess.Popen(command, env=rank_environment(self._redis_url), pass_fds=[theirs.fileno()])
        self._channel, self._ready = ours, False
        log.info("standby started", pid=self._process.pid)

    def _listen(self, channel: socket.socket) -> None:
        try:
            self._ready = channel.recv(len(READY)) == READY
        except OSError:  # nothing said yet
            return
        if self._ready and self._process is not None:
            log.info("standby ready", pid=self._process.pid)

    def _forget(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._process, self._channel, self._ready = None, None, False
