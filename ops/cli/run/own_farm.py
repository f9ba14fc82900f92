"""The processes that `furrow run` starts for itself: a private farm, or an API process for a farm that has none here.

They end with this process, kill -9 included.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from control.errors import FurrowError
from control.listening import free_port
from control.operations.local_farms import run_folder
from control.operations.options import FIXED_KEYS_VARIABLE
from control.settings import REDIS_AWAITED
from ops.cli.options import demo_environment
from ops.local.embedded import EmbeddedServer
from ops.local.supervisor import Part, Supervisor

TICK_S = 0.1
MOST_ENDS = 3
"""Ends of a process after which the start is given up."""
_NEW_S = 60.0
_LAST_LINES = 15
GRACE_S = 1
"""Seconds for open streams of the API process at the end; a conversation has none by then."""


class OwnFarm:
    """Starts the processes as a context manager; `address` and `key` are those of its API process.

    `redis`: the farm's Redis, or None for a private farm. The API process takes the key of this conversation only.
    """

    def __init__(self, redis: str | None, verbose: bool, say: Callable[[str], None]) -> None:
        """`verbose`: the logs go to standard error, else to a file that is deleted at the end."""
        self.redis = redis or ""
        self.address = ("127.0.0.1", 0)
        self.key = f"run-{secrets.token_urlsafe(24)}"
        self._ends = 0
        self._private = redis is None
        self._verbose = verbose
        self._say = say
        self._stack = ExitStack()
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="own-farm")

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def __enter__(self) -> OwnFarm:
        try:
            self._folder = self._stack.enter_context(_private_folder())
            server = EmbeddedServer(self._folder / "redis") if self._private else None
            if server is not None:
                self._stack.callback(server.stop)
                server.begin()
                # By its folder, so that no environment has the private server's password.
                self.redis = str(self._folder / "redis")
            self.address = ("127.0.0.1", free_port("127.0.0.1", 0))
            self._thread.start()
            self._started.wait()
            if server is not None:
                server.wait_until_ready()
                server.publish()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except KeyboardInterrupt:
                self.hurry()
        self._stack.close()

    def hurry(self) -> None:
        """Kill what has not ended yet."""
        self._hurry.set()

    def check(self) -> None:
        """Raises FurrowError, with the end of the log, where a process ends again and again."""
        if self._ends >= MOST_ENDS:
            lines = [] if self._verbose else (self._folder / "log").read_text(errors="replace").splitlines()
            last_words = "".join(f"\n  {line}" for line in lines[-_LAST_LINES:])
            raise FurrowError(f"a process that this command started ended {self._ends} times.{last_words}")

    def _supervise(self) -> None:
        """Start, restart and stop the processes in one thread: on Linux a child dies with its thread."""
        with ExitStack() as stack:
            log = None if self._verbose else stack.enter_context((self._folder / "log").open("ab"))
            redis_settings = {"FURROW_REDIS_URL": self.redis, REDIS_AWAITED: "1" if self._private else "0"}
            environment = {**redis_settings, "FURROW_METRICS": "off", **demo_environment()}
            supervisor = Supervisor({**environment, FIXED_KEYS_VARIABLE: self.key}, self._note, log)
            stack.callback(supervisor.stop, self._hurry.is_set)
            try:
                if self._private:
                    supervisor.start(Part("worker", "worker.agent.supervision", []))
                host, port = self.address
                api = ["--host", host, "--port", str(port), "--keys", "--grace", str(GRACE_S)]
                supervisor.start(Part("api", "api", api))
            finally:
                self._started.set()
            while not self._stop.wait(TICK_S):
                supervisor.tend()

    def _note(self, line: str) -> None:
        self._ends += 1
        if self._verbose:
            self._say(line)


@contextmanager
def _private_folder() -> Generator[Path]:
    """A folder for this process, deleted at the end. Those that killed processes left are deleted too."""
    state = run_folder()
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(state)
        path = Path(tempfile.mkdtemp(prefix="farm-", dir=state))
    except OSError:
        path = Path(tempfile.mkdtemp(prefix="furrow-run-"))
    lock = os.open(path / "in-use", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _sweep(state: Path) -> None:
    """Delete folders whose process has ended without doing so: they hold the texts of its conversation."""
    for path in state.glob("farm-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < _NEW_S:
                continue  # it may have no lock yet
            lock = os.open(path / "in-use", os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
