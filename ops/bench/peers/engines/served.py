"""A server in a process of its own, asked over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

from control.listening import free_port
from ops.bench.common.client import Base
from ops.bench.peers.base import Failed, Setup, Stream, Unavailable
from ops.bench.peers.engines.child_log import ChildLog
from ops.bench.peers.engines.completions import complete_all

HOST = "127.0.0.1"
START_LIMIT_S = 600.0
STOP_LIMIT_S = 20.0
LOOK_S = 0.05


class Served:
    """An engine behind an HTTP server. A subclass has `command` and `fields`, and may name another `health` path."""

    health = "/health"
    at_once = True
    absent: tuple[str, ...] = ()
    """Parts of its last lines that mean that it is not installed."""

    def __init__(self, setup: Setup, env: dict[str, str] | None = None) -> None:
        self._setup, self._env = setup, env or dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: ChildLog | None = None
        self._base = Base(HOST, 0)

    def command(self, port: int) -> list[str]:
        """The command line. Raises Unavailable."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """Fields of a completion's body beside prompt, length and temperature."""
        return {}

    def start(self) -> float:
        """As Engine's."""
        self._base = Base(HOST, free_port(HOST, 0))
        command = self.command(self._base.port)
        self._log = ChildLog()
        began = time.monotonic()
        try:
            self._process = subprocess.Popen(
                command, stdout=self._log.file, stderr=self._log.file, env=self._env, start_new_session=True
            )
        except OSError as error:
            raise Unavailable(f"{command[0]} can't be started: {error.strerror or error}") from error
        while not self._healthy():
            if self._process.poll() is not None:
                words = self._log.last_words()
                kind = Unavailable if any(sign in words for sign in self.absent) else Failed
                raise kind(f"it ended with status {self._process.returncode}: {words}")
            if time.monotonic() - began > START_LIMIT_S:
                raise Failed(f"it was not ready within {START_LIMIT_S:.0f} s: {self._log.last_words()}")
            time.sleep(LOOK_S)
        return began

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        """As Engine's."""
        return asyncio.run(complete_all(self._base, self.fields(), prompts, tokens))

    def stop(self) -> None:
        """As Engine's; its children end with it."""
        if self._process is not None:
            _signal(self._process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):  # it is killed below
                self._process.wait(STOP_LIMIT_S)
            _signal(self._process, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(self._base.host, self._base.port, timeout=10)
        try:
            connection.request("GET", self.health)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the process and all of its session."""
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, number)
