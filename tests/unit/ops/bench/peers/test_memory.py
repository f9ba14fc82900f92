"""Memory of measured processes: shared pages once, one moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ops.harness import processes
from tests.waiting import until

FORKED = """
import mmap, os, sys
held = mmap.mmap(-1, 48 * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
held.write(b"x" * len(held))
if os.fork() == 0 and sys.argv[1] == "writes":
    held.seek(0)
    held.write(b"y" * len(held))
os.write(1, b"there\\n")
sys.stdin.read()
"""


@pytest.mark.parametrize(("how", "mib"), [("shares", 48), ("writes", 96)])
def test_pages_of_a_fork_count_once_until_they_are_written(how: str, mib: int) -> None:
    """The second is the control."""
    command = [sys.executable, "-S", "-c", FORKED, how]
    before = processes.memory_of_children()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == 2 * [b"there\n"]
        assert mib - 1 < processes.memory_of_children() - before < mib + 40
        process.stdin.close()


def test_the_peak_is_that_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of several looks are not added; the last look is at the end."""
    sums = iter([3.0, 9.0, 4.0])
    monkeypatch.setattr(processes.Peak, "EVERY_S", 0.001)
    monkeypatch.setattr(processes, "memory_of_children", lambda _title: next(sums, 5.0))
    peak = processes.Peak()
    with peak.watched():
        until(lambda: peak.mib == 9.0, 40.0)
    assert peak.mib == 9.0
