"""A private Redis-compatible server for one machine: started, watched and stopped by the process that needs it.

Only loopback, a random password that is kept in the data folder, every write in an append-only file that is synced
each second, a bound of its memory, and never an eviction. It ends with its parent, kill -9 included, and is started
again when it crashes. The libraries that it needs are imported once the server is started, beside its own start.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from control.errors import RedisUnavailable, SettingsError
from control.listening import free_port
from ops.common.waiting import pause_after
from ops.local.server_binary import ServerBinary, default_memory, find_server

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

START_LIMIT_S = 30.0
"""Time for the server to answer; it first reads its whole append-only file."""
STOP_LIMIT_S = 10.0
_PAUSES_S = (0.0, 0.2, 1.0, 5.0)
"""Pauses before the starts of a server that crashed; the last one is repeated."""
_TRIES_FOR_A_PORT = 5


class EmbeddedServer:
    """One server on `folder`, with a maxmemory of `memory` bytes. A context manager whose value is the URL.

    The same folder can't serve two at a time. Clients keep their URL over a crash: port, password and data stay.
    """

    def __init__(self, folder: Path, binary: ServerBinary | None = None, memory: int | None = None) -> None:
        self._folder = folder
        self._binary = binary
        self._memory = memory or default_memory()
        self._password = ""
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._stopping = threading.Event()
        self._answered = threading.Event()
        self._failure: RedisUnavailable | None = None
        self._supervisor: threading.Thread | None = None

    def __enter__(self) -> str:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        # With a user name, because redis-cli 6.2 refuses `-u` with a password alone.
        return f"redis://default:{self._password}@127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> str:
        """Start, wait until it answers, and publish its URL in the folder; returns the URL, password included. Raises
        as `begin` and `wait_until_ready`."""
        self.begin()
        self.wait_until_ready()
        self.publish()
        return self.url

    def begin(self) -> None:
        """Start it, without a wait. Raises SettingsError for a folder that is in use or can't be written, or where no
        server is installed."""
        self._binary = self._binary or find_server()
        self._take_folder()
        self._withdraw()  # what a killed process left, before others look for it
        self._password = self._kept_password()
        # All processes are started by this one thread: on Linux a child dies with the thread that started it.
        self._supervisor = threading.Thread(target=self._supervise, name="embedded-redis", daemon=True)
        self._supervisor.start()

    def wait_until_ready(self) -> None:
        """Return once it answers. Raises RedisUnavailable with the server's own last words where it does not come
        up."""
        assert self._binary is not None
        self._answered.wait()
        if self._failure is not None:
            self.stop()
            raise self._failure
        _log().info("private server", kind=self._binary.kind, version=self._binary.version, folder=str(self._folder))

    def publish(self) -> None:
        """Let others find it by its folder, once it is ready for them."""
        _write_private(self._folder / "port", str(self._port))
        _write_private(self._folder / "url", self.url)

    def stop(self) -> None:
        """End the server in order, with its data on disk; kill it past STOP_LIMIT_S. Nothing happens if none runs."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        if self._supervisor is not None:
            self._supervisor.join(STOP_LIMIT_S)
            if self._supervisor.is_alive() and self._process is not None:
                self._process.kill()
            self._supervisor.join()
            self._supervisor = None
        self._withdraw()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _withdraw(self) -> None:
        for name in ("url", "port"):
            (self._folder / name).unlink(missing_ok=True)

    # --- the folder --------------------------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.chmod(0o700)
            lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise SettingsError(
                f"the data folder {self._folder} can't be used: {error.strerror}; name another with --data"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise SettingsError(
                f"the data folder {self._folder} is in use by another Furrow; stop that one or name another with --data"
            ) from error
        self._lock = lock

    def _kept_password(self) -> str:
        file = self._folder / "password"
        if not file.exists():
            _write_private(file, secrets.token_hex(24))
        return file.read_text().strip()

    def _write_config(self) -> Path:
        """Write the configuration, with the password: `ps` would show it on the command line."""
        config = self._folder / "server.conf"
        folder = str(self._folder.resolve()).replace("\\", "\\\\").replace('"', '\\"')
        _write_private(
            config,
            "bind 127.0.0.1\nprotected-mode yes\ndaemonize no\n"
            f'port {self._port}\nrequirepass {self._password}\ndir "{folder}"\nlogfile server.log\n'
            'appendonly yes\nappendfsync everysec\nsave ""\n'
            f"maxmemory {self._memory}\nmaxmemory-policy noeviction\n",
        )
        return config

    # --- the process -------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        crashes = 0
        try:
            self._process = self._first_process()
        except RedisUnavailable as error:
            self._failure = error
            return
        finally:
            self._answered.set()
        while True:
            status = self._wait(self._process)
            if self._stopping.is_set():
                return
            _log().error("the private server ended; starting it again", status=status, last_words=self._last_words())
            crashes += 1
            if self._stopping.wait(pause_after(crashes, _PAUSES_S)):
                return
            self._process = self._spawn()

    def _first_process(self) -> subprocess.Popen[bytes]:
        """Start on a free port, with several attempts: another process may take the port before the server does."""
        for _ in range(_TRIES_FOR_A_PORT):
            self._port = free_port("127.0.0.1", 0)
            process = self._process = self._spawn()
            if self._comes_up(process):
                return process
            if "already in use" not in self._last_words():
                break
        raise RedisUnavailable(
            f"the private server {self._binary.path if self._binary else ''} on {self._folder} did not start: "
            f"{self._last_words() or 'it said nothing'}"
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        assert self._binary is not None
        return start_server(self._binary.path, self._write_config())

    def _comes_up(self, process: subprocess.Popen[bytes]) -> bool:
        from redis import exceptions as redis_errors

        from control.redis.clients import connect

        deadline = time.monotonic() + START_LIMIT_S
        with connect(self.url) as client:
            while process.poll() is None and time.monotonic() < deadline and not self._stopping.is_set():
                try:
                    client.ping()
                    return True
                except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError):
                    time.sleep(0.01)
        process.kill()
        self._ended(process.wait(), process)
        return False

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until the process ends, without waking up before. `stop` ends it."""
        if self._stopping.is_set():
            process.terminate()  # once more: it may have been started after the stop was asked for
        return self._ended(process.wait(), process)

    @staticmethod
    def _ended(status: int, process: subprocess.Popen[bytes]) -> int:
        if process.stdin is not None:
            process.stdin.close()
        return status

    def _last_words(self) -> str:
        return last_words(self._folder / "server.log")


def start_server(binary: Path, config: Path, *arguments: str, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """A Redis-compatible server that can't outlive this process (server_child.py)."""
    script = Path(__file__).with_name("server_child.py")
    # Its own session: a terminal's Ctrl-C must not end it before those who use it.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", script, str(os.getpid()), binary, config, *arguments],
        stdin=subprocess.DEVNULL if sys.platform == "linux" else subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )


def last_words(log: Path) -> str:
    """The last lines of a server's log, in one; empty where there is none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return " / ".join(line.strip() for line in lines[-3:])


def _log() -> FilteringBoundLogger:
    import structlog

    return structlog.get_logger()


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, from its first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
