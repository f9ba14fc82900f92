"""A real host supervisor for tests, whose agent is the test itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.supervision.client import SupervisorClient

PYTHON = sys.executable
"""Tests put scripts in its place."""
ROOT = Path(__file__).parent.parent

SCRIPT = """
import signal, socket, subprocess, sys
from worker.supervision import supervisor

class Served(supervisor.HostSupervisor):
    def start_agent(self):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a shell can't trap what was ignored when it began
        self._agent = subprocess.Popen(["sleep", "600"])
        self.attach(socket.socket(fileno=int(sys.argv[1])))

supervisor.SILENT_S = float("inf")
sys.exit(Served([], supervisor.Limits(absent_s=float("inf"), stop_s=0.0)).run())
"""


@contextmanager
def supervised() -> Iterator[SupervisorClient]:
    """A client of a supervisor; every process that it started is killed at the end."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [PYTHON, "-c", SCRIPT, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    client = SupervisorClient(ours)
    try:
        yield client
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) in (0, -signal.SIGKILL)
        client.close()
