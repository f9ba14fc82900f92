"""Processes of a measurement: on cores of their own, with what they cost and the memory that they take."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, get_type_hints

import msgspec
import psutil

from control.errors import FurrowError, SettingsError
from control.process import child_environment, die_with_parent

MIB = 2**20

T = TypeVar("T")


def split_cores() -> tuple[set[int], set[int]]:
    """One core for what is measured, the others for all else. Raises SettingsError where there is only one."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SettingsError("this takes two cores: one for the API process, another for clients, leaders and Redis")
    return {first}, set(others)


class ProcessEnded(FurrowError):
    """A process of a measurement ended before its result. Its standard error says why."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} ended with status {status} before its result; its message stands above")


class Process:
    """A `python -m` process on some cores, with its standard output at hand; `text` is its standard input."""

    def __init__(
        self, cores: set[int], module: str, arguments: Sequence[str], environment: Mapping[str, str], text: str = ""
    ) -> None:
        self.name = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=child_environment(**environment),
            stdin=subprocess.PIPE if text else None,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        if self.process.stdin is not None:
            self.process.stdin.write(text)
            self.process.stdin.close()
            self.process.stdin = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """Its next line. Raises ProcessEnded."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ProcessEnded(self.name, self.process.wait())
        return line

    def await_line(self, line: str) -> None:
        """Wait for this line, which must be the next one."""
        received = self.line()
        if received != f"{line}\n":
            raise RuntimeError(f"{self.name} said {received!r}, not {line!r}")

    def result(self, kind: type[T]) -> T:
        """The result of its function."""
        return msgspec.json.decode(self.line(), type=kind)

    def stop(self, kind: type[T]) -> T:
        """SIGTERM; what its function returns then."""
        self.process.terminate()
        output, _ = self.process.communicate(timeout=60)
        return msgspec.json.decode(output, type=kind)


@contextmanager
def running(
    cores: set[int], module: str, *arguments: str, environment: Mapping[str, str] | None = None, text: str = ""
) -> Generator[Process]:
    part = Process(cores, module, arguments, environment or {}, text)
    try:
        yield part
    finally:
        if part.process.poll() is None:
            part.process.kill()
        part.process.wait()
        assert part.process.stdout is not None
        part.process.stdout.close()


@contextmanager
def calling(cores: set[int], function: Callable[..., object], **arguments: object) -> Generator[Process]:
    """A function in a process of its own, on some cores. What it returns is the last line of its output.

    Its arguments, passwords among them, are in no command line.
    """
    text = msgspec.json.encode(arguments, enc_hook=str).decode()
    place = f"{function.__module__}:{function.__name__}"
    with running(cores, "ops.harness.processes", place, text=text) as part:
        part.name = place
        yield part


def call(place: str) -> None:
    """The process of `calling`: `place` is MODULE:FUNCTION. A FurrowError or a ConnectionError becomes one line and
    exit status 1."""
    die_with_parent()
    module, _, name = place.partition(":")
    function = getattr(importlib.import_module(module), name)
    hints = get_type_hints(function)
    arguments: dict[str, Any] = msgspec.json.decode(sys.stdin.read())
    converted = {
        name: msgspec.convert(value, hints[name], dec_hook=lambda kind, value: kind(value))
        for name, value in arguments.items()
    }
    try:
        returned = function(**converted)
    except (FurrowError, ConnectionError) as error:
        sys.exit(f"{place}: {error}")
    print(msgspec.json.encode(returned).decode(), flush=True)


def until_terminated() -> Callable[[], bool]:
    """Catch SIGTERM from now on; the returned function is True once it came."""
    terminated = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal terminated  # a threading.Event would be set under its own lock, which this thread may hold just now
        terminated = True

    signal.signal(signal.SIGTERM, stop)
    return lambda: terminated


# --- processor time ---------------------------------------------------------------------------------------------------


class Meter:
    """The share of a core that each named process uses, its children included."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {name: _processor_s(pid) for name, pid in pids.items()}
        self._began = time.monotonic()

    def processor_s(self) -> dict[str, float]:
        """Seconds of processor time since it began."""
        return {name: _processor_s(pid) - self._before[name] for name, pid in self._pids.items()}

    def shares(self) -> dict[str, float]:
        seconds = time.monotonic() - self._began
        return {name: processor_s / seconds for name, processor_s in self.processor_s().items()}


def _processor_s(pid: int) -> float:
    """CPU seconds of a process and its children."""
    parent = psutil.Process(pid)
    total = 0.0
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


# --- memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def looking(look: Callable[[], object], every_s: float) -> Generator[None]:
    """Call `look` again and again from a thread, until the end or an OSError, such as that of an ended process."""
    over = threading.Event()

    def run() -> None:
        with suppress(OSError):
            while not over.wait(every_s):
                look()

    thread = threading.Thread(target=run, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def resident(pid: int) -> float:
    """MiB."""
    return psutil.Process(pid).memory_info().rss / MIB


def memory_of_children(title: str = "") -> float:
    """MiB of this process's descendants whose titles begin so, each shared page once (PSS); 0 where there are none."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error, OSError):  # it ended meanwhile
            if process.name().startswith(title):
                total += process.memory_full_info().pss
    return total / MIB


class Peak:
    """The largest sum that was seen of this process's descendants with a title at one moment, in MiB.

    The peaks that the kernel keeps of each process (VmHWM) are of different moments and count shared pages for each, so
    that their sum is more than was ever used.
    """

    EVERY_S = 0.2
    """A look takes some milliseconds for each GiB."""

    def __init__(self, title: str = "") -> None:
        self._title = title
        self.mib = 0.0

    def look(self) -> None:
        self.mib = max(self.mib, memory_of_children(self._title))

    @contextmanager
    def watched(self, every_s: float | None = None) -> Generator[None]:
        """Look again and again. Not while rates are taken, which it would slow down."""
        try:
            with looking(self.look, every_s or self.EVERY_S):
                yield
        finally:
            self.look()


class MemoryByPart:
    """`samples`: MiB of the parts of a farm, which are descendants of this process, at each look."""

    EVERY_S = 0.5

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)

    def look(self) -> None:
        sums: dict[str, float] = defaultdict(float)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it ended meanwhile
                part = part_of(process.name(), process.cmdline())
                if part is not None:
                    sums[part] += process.memory_info().rss / MIB
        for part, mib in sums.items():
            self.samples[part].append(mib)


def part_of(name: str, command: Sequence[str]) -> str | None:
    """Which part of a farm a process is: api, redis, rank; None for any other."""
    if name.startswith("furrow-rank"):
        return "rank"
    if any(name.startswith(server) for server in ("redis", "valkey")):
        return "redis"
    return "api" if "api" in command[1:4] else None


def growth(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Part → MiB by which the peak of the second half of the time exceeds that of the first. Raises ValueError for
    less than two samples of a part."""
    grown: dict[str, float] = {}
    for part, values in samples.items():
        if len(values) < 2:
            raise ValueError(f"{len(values)} samples of {part} say nothing about growth")
        middle = len(values) // 2
        grown[part] = max(values[middle:]) - max(values[:middle])
    return grown


if __name__ == "__main__":
    call(sys.argv[1])
