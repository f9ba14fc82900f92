"""Programs of the product in forks of a process that has imported them: they start without seconds of imports.

What a program is differs in its command line alone, which is that of this module. Tests of the start use a process of
their own.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tests.rooms import ROOT

_PR_SET_PDEATHSIG = 1
_MOST = 1 << 20
"""Bytes of a request: command line and environment."""


class Forked:
    """A program that runs: the part of subprocess.Popen that tests need."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._told = connection

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises TimeoutExpired."""
        status = self._read(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                data = self._told.recv(64)
            except (BlockingIOError, TimeoutError):
                return None
            assert data, "the process that waits for this one has ended"
            self._told.close()
            self.returncode = int(data)
        return self.returncode


class WarmProgram:
    """A process that has imported `module`; its forks run the module's `main`."""

    def __init__(self, module: str) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=ROOT)
        atexit.register(self._stop)

    def start(
        self,
        arguments: Sequence[str],
        environment: dict[str, str],
        output: IO[Any],
        constants: Mapping[str, float] | None = None,
    ) -> Forked:
        """Run it like `python -m module arguments`, in the folder of this process; it writes to `output`. `constants`:
        values of its modules' constants, by `MODULE.NAME`, as a test would set them in its own process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"arguments": list(arguments), "environment": environment, "constants": dict(constants or {})}
        request["folder"] = os.getcwd()  # noqa: PTH109
        with theirs:
            socket.send_fds(self._link, [json.dumps(request).encode()], [theirs.fileno(), output.fileno()])
        ours.settimeout(40)
        return Forked(int(ours.recv(64)), ours)

    def _stop(self) -> None:
        self._link.close()
        self._process.wait(40)


@functools.cache
def warm(module: str) -> WarmProgram:
    """The one of this test process."""
    return WarmProgram(module)


# --- in the warm process ------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(link: socket.socket) -> dict[str, Any]:
    """Answer requests until the test process is gone. Returns in a fork, with its request."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait need nobody who waits for them
    while True:
        words, descriptors, _, _ = socket.recv_fds(link, _MOST, 2)
        if not words:
            sys.exit(0)
        if os.fork() == 0:
            link.close()
            told, output = descriptors
            _wait_for_fork(socket.socket(fileno=told))
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            return json.loads(words)
        for descriptor in descriptors:
            os.close(descriptor)


def _wait_for_fork(connection: socket.socket) -> None:
    """Tell the pid of one more fork and its exit status. Returns in that fork."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with_parent()
    pid = os.fork()
    if pid == 0:
        connection.close()
        return
    connection.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def main() -> None:
    module, descriptor = sys.argv[1:]
    program = importlib.import_module(module)
    assert threading.active_count() == 1, "a fork would lack the other threads"
    gc.collect()
    gc.freeze()  # forks share the pages of what was imported
    request = _serve(socket.socket(fileno=int(descriptor)))
    gc.unfreeze()
    environment = request["environment"]
    if "FURROW_PARENT" in environment:
        environment["FURROW_PARENT"] = str(os.getppid())
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    for place, value in request["constants"].items():
        owner, _, name = place.rpartition(".")
        assert hasattr(sys.modules[owner], name), place
        setattr(sys.modules[owner], name, value)
    sys.argv[1:] = request["arguments"]
    program.main()


if __name__ == "__main__":
    main()
