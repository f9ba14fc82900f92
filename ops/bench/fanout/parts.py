"""The processes of a measurement: each on cores of its own, and what it costs them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from control.errors import SettingsError
from control.process import child_environment

MIB = 2**20


def split_cores() -> tuple[set[int], set[int]]:
    """One core for what is measured, the others for all else. Raises SettingsError where there is only one."""
    first, *others = sorted(os.sched_getaffinity(0))
    if not others:
        raise SettingsError("this takes two cores: one for the API process, another for clients, leaders and Redis")
    return {first}, set(others)


class Part:
    """A `python -m` process on some cores, with its standard output at hand."""

    def __init__(self, cores: set[int], module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = module
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=child_environment(**environment),
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """Its next line. Raises RuntimeError where it has ended instead."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self.process.wait()}")
        return line

    def stop(self) -> str:
        """SIGTERM; what it says last."""
        self.process.terminate()
        said, _ = self.process.communicate(timeout=60)
        return said


@contextmanager
def running(
    cores: set[int], module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Generator[Part]:
    part = Part(cores, module, arguments, environment or {})
    try:
        yield part
    finally:
        if part.process.poll() is None:
            part.process.kill()
        part.process.wait()
        assert part.process.stdout is not None
        part.process.stdout.close()


class Meter:
    """The share of a core that each named process uses, its children included."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {name: _spent(pid) for name, pid in pids.items()}
        self._began = time.monotonic()

    def spent(self) -> dict[str, float]:
        """Seconds of processor time since it began."""
        return {name: _spent(pid) - self._before[name] for name, pid in self._pids.items()}

    def shares(self) -> dict[str, float]:
        seconds = time.monotonic() - self._began
        return {name: spent / seconds for name, spent in self.spent().items()}


def resident(pid: int) -> float:
    """MiB."""
    return psutil.Process(pid).memory_info().rss / MIB


def _spent(pid: int) -> float:
    """CPU seconds of a process and its children."""
    parent, total = psutil.Process(pid), 0.0
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
