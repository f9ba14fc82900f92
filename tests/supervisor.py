"""A real host supervisor for tests, whose agents are clients in the test's own process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.waiting import until
from worker.agent.supervision.client import SupervisorClient

PYTHON = sys.executable
"""Tests put scripts in its place."""
ROOT = Path(__file__).parent.parent

SCRIPT = """
import signal, socket, subprocess, sys, time
from worker.agent.supervision import children, supervisor
from worker.agent.supervision.supervisor import SupervisorLimits

listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
listener.setblocking(False)

class Served(supervisor.HostSupervisor):
    def start_agent(self):
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # a shell can't trap what was ignored when it began
        try:
            link, _ = listener.accept()
        except BlockingIOError:
            self._due = time.monotonic() + 0.01
            return
        self._agent = subprocess.Popen(["sleep", "600"])  # what can be killed in the place of the test
        self.attach(link)

supervisor.TICK_S = 0.02
supervisor.PAUSES_S = (0.0, 0.05)
children.FORK_WITHIN_S = float(sys.argv[2])
supervisor.AGENT_SILENT_S = float("inf")
sys.exit(Served([], SupervisorLimits(absent_s=float("inf"), stop_s=0.0)).run())
"""


def is_agent(process: psutil.Process) -> bool:
    """True for the process in the place of an agent; a child that just ends has no command line."""
    with suppress(psutil.Error):
        return process.cmdline() == ["sleep", "600"]
    return False


@dataclass
class Host:
    """A supervisor and the agents that were connected to it."""

    process: subprocess.Popen[bytes]
    path: str
    clients: list[SupervisorClient] = field(default_factory=list)

    def connect(self) -> SupervisorClient:
        """A new agent, with what the supervisor told it first."""
        link = socket.socket(socket.AF_UNIX)

        def connected() -> bool:
            with suppress(OSError):
                link.connect(self.path)
                return True
            return False

        until(connected, 40.0)
        self.clients.append(SupervisorClient(link))
        return self.clients[-1]

    def lose_agent(self) -> None:
        """The agent dies; returns once the supervisor has reaped it."""
        children = psutil.Process(self.process.pid).children
        agent = until(lambda: next(filter(is_agent, children()), None), 40.0)
        agent.kill()
        until(lambda: not psutil.pid_exists(agent.pid), 40.0)
        self.clients[-1].close()


@contextmanager
def supervised_host(fork_within_s: float = 20.0) -> Iterator[Host]:
    """A supervisor without an agent; every process that it started is killed at the end."""
    with tempfile.TemporaryDirectory(prefix="furrow-supervisor-") as folder:
        path = str(Path(folder) / "socket")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        host = Host(subprocess.Popen([PYTHON, "-c", SCRIPT, path, str(fork_within_s)], env=environment), path)
        try:
            yield host
        finally:
            host.process.send_signal(signal.SIGTERM)
            assert host.process.wait(40) in (0, -signal.SIGTERM, -signal.SIGKILL)
            for client in host.clients:
                client.close()


@contextmanager
def supervised() -> Iterator[SupervisorClient]:
    """The client of a supervisor that keeps its agent for the whole block."""
    with supervised_host() as host:
        yield host.connect()
