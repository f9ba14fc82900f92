"""The Redis-compatible server of the private farm, which faults stop, kill and restart."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from redis import exceptions as redis_errors

import ops.local.server_child
from control.listening import free_port
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from ops.chaos.errors import ChaosError
from ops.common.waiting import until
from ops.local.server_binary import find_server

HOST = "127.0.0.1"
READY_WITHIN_S = 30.0


class ServerProcess:
    """One server on `folder`, always on the same port. Use from one thread that lives as long as the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._binary = find_server()
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port(HOST, 0)
        self.url = f"redis://{HOST}:{self.port}/0"
        self.client: SyncRedis = connect(self.url)
        """A direct connection, for the faults; the farm may use a proxy."""

    @property
    def pid(self) -> int:
        """Raises ChaosError while it does not run."""
        if self._process is None:
            raise ChaosError("the server does not run")
        return self._process.pid

    def start(self) -> None:
        """Start, or start again on what the folder holds, and wait until it answers."""
        self.launch()
        until(self._started, f"the server on {self.folder} answers", READY_WITHIN_S)

    def _started(self) -> bool:
        """True once the server answers. Raises ChaosError if it has ended."""
        if self._process is None or self._process.poll() is not None:
            raise ChaosError(f"the server on {self.folder} ended: {self._last_words()}")
        return self.answers()

    def launch(self, *options: str) -> None:
        """Start without waiting: loading its data may take a while. `options` are more lines of its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        lines = [f"bind {HOST}", f"port {self.port}", f"dir {self.folder}", "logfile server.log", 'save ""']
        lines += ["appendonly yes", "appendfsync everysec", "maxmemory-policy noeviction"]
        if int(self._binary.version.split(".")[0].removeprefix("v=")) >= 7:  # before, DEBUG was always allowed
            lines.append("enable-debug-command local")
        config.write_text("\n".join([*lines, *options]) + "\n")
        # It can't outlive this process, however that ends.
        command = [sys.executable, "-I", "-S", ops.local.server_child.__file__, str(os.getpid())]
        self._process = subprocess.Popen([*command, self._binary.path, config], start_new_session=True)

    def answers(self) -> bool:
        """True if it serves commands now."""
        try:
            return bool(self.client.ping())
        except (redis_errors.RedisError, OSError):
            return False

    def run_id(self) -> str:
        """Another one after every start."""
        return str(self.client.info("server")["run_id"])

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As a power cut would: SIGKILL, no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)
        self.client.close()

    def lose_everything(self) -> None:
        """Take away what a killed server would find at its next start."""
        if self._process is not None:
            raise ChaosError("the server runs: kill it first")
        shutil.rmtree(self.folder)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(READY_WITHIN_S)
            self._process = None

    def _last_words(self) -> str:
        log = self.folder / "server.log"
        return " / ".join(log.read_text(errors="replace").splitlines()[-3:]) if log.exists() else "it said nothing"
