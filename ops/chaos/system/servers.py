"""Private data servers and Sentinels, each on a port of its own, to be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis import exceptions as redis_errors
from redis.backoff import NoBackoff
from redis.retry import Retry

from control.listening import free_port
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from ops.chaos.errors import ChaosError
from ops.common.waiting import until
from ops.local.embedded import last_words, start_server
from ops.local.server_binary import find_server

PASSWORD = "chaos"
_BUS = 10_000
"""A Cluster's node listens for its peers on its port plus this."""


@dataclass
class Node:
    """A server process on `port` of 127.0.0.1. It ends with the process that started it."""

    binary: Path
    folder: Path
    port: int
    config: str
    arguments: tuple[str, ...] = ()
    password: str = PASSWORD
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def place(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    def client(self) -> redis.Redis:
        """For its own commands: 2 s of patience, text replies, no attempt but the first, after which others pause."""
        return redis.Redis(
            port=self.port,
            password=self.password or None,
            decode_responses=True,
            protocol=2,
            socket_timeout=2.0,
            retry=Retry(NoBackoff(), 0),
        )

    def ask(self, *words: Any) -> Any:
        """The raw reply of one command."""
        with self.client() as client:
            client.response_callbacks.clear()
            return client.execute_command(*words)

    def start(self) -> None:
        """Start, or start again on the data and configuration that it left, and wait until it answers."""
        self.launch()
        until(self._started, f"the server on port {self.port} answers")

    def launch(self) -> None:
        """Start without waiting."""
        config = self.folder / f"{self.port}.conf"
        if not config.exists():  # a Sentinel writes what it learns into it
            config.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n{self.config}\n")
        self.process = start_server(self.binary, config, *self.arguments, stderr=subprocess.DEVNULL)

    def _started(self) -> bool:
        """True once it answers. Raises RuntimeError where it has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(
                f"{self.binary} on port {self.port} ended with status {self.process.returncode}: {self.last_words()}"
            )
        return self.answers()

    def answers(self) -> bool:
        """True if it serves commands now."""
        with contextlib.suppress(redis_errors.RedisError, OSError):
            return bool(self.ask("PING"))
        return False

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL, as a power cut; a stopped process goes too."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdin is not None:
                self.process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def last_words(self) -> str:
        return last_words(self.folder / "server.log") or "it said nothing"


class ServerProcess(Node):
    """The one server of a private farm, with an append-only file in `folder`. One thread uses it."""

    def __init__(self, folder: Path) -> None:
        binary = find_server()
        lines = ["logfile server.log", 'save ""', "appendonly yes", "appendfsync everysec"]
        lines.append("maxmemory-policy noeviction")
        if int(binary.version.split(".")[0].removeprefix("v=")) >= 7:  # before, DEBUG was always allowed
            lines.append("enable-debug-command local")
        super().__init__(binary.path, folder, free_port("127.0.0.1", 0), "\n".join(lines), password="")
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.direct: SyncRedis = connect(self.url)
        """A direct connection, for the faults; the farm may use a proxy."""

    @property
    def pid(self) -> int:
        """Raises ChaosError while it does not run."""
        if self.process is None or not self.alive:
            raise ChaosError("the server does not run")
        return self.process.pid

    def launch(self, *options: str) -> None:
        """Start without waiting: loading its data may take a while. `options` are more lines of its configuration."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.port}.conf").unlink(missing_ok=True)
        config, self.config = self.config, "\n".join([self.config, *options])
        super().launch()
        self.config = config

    def run_id(self) -> str:
        """Another one after every start."""
        return str(self.direct.info("server")["run_id"])

    def stop(self) -> None:
        if self.process is not None and self.alive:
            self.process.terminate()
            self.process.wait(30.0)
        self.kill()
        self.direct.close()

    def lose_everything(self) -> None:
        """Take away what a killed server would find at its next start."""
        if self.alive:
            raise ChaosError("the server runs: kill it first")
        shutil.rmtree(self.folder)


def free_ports(count: int, bus: bool = False) -> list[int]:
    """Ports that nobody listens on; with `bus` the ones that a Cluster's nodes take beside them are free too."""
    ports: list[int] = []
    while len(ports) < count:
        # Below the ports that Linux gives to connections, also with the bus: one of those may come between.
        port = random.SystemRandom().randrange(10_000, 22_000)
        if port not in ports and _free(port) and (not bus or _free(port + _BUS)):
            ports.append(port)
    return ports


def _free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False
