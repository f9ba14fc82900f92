"""The memory that the processes that are measured take at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import psutil

MIB = 2**20
EVERY_S = 0.2
"""Between two looks while an engine is watched; a look takes some milliseconds for each GiB."""


@contextmanager
def looking(look: Callable[[], object], every_s: float) -> Generator[None]:
    """Call `look` again and again, from a thread; an OSError ends that, as of a process that has ended."""
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


class Peak:
    """The largest sum that was seen of this process's descendants at one moment, in MiB.

    A page that several share counts once (PSS). The peaks that the kernel keeps of each process (VmHWM) are of
    different moments and count shared pages for each, so that their sum is more than was ever used.
    """

    def __init__(self) -> None:
        self.mib = 0.0

    def look(self) -> None:
        """Compare the sum of now."""
        self.mib = max(self.mib, memory_of_children())

    @contextmanager
    def watched(self) -> Generator[None]:
        """Look again and again, from a thread. Not while rates are taken, which it would slow down."""
        try:
            with looking(self.look, EVERY_S):
                yield
        finally:
            self.look()


def memory_of_children() -> float:
    """MiB of this process's descendants together, each shared page once; 0 where there are none."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_full_info().pss
        except (psutil.Error, OSError):  # it ended meanwhile
            continue
    return total / MIB
