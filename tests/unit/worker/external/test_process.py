"""The process that leads an engine's group."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from control.process import python_command
from worker.external.host import last_lines

TAKE = "import sys, time; block = b'x' * (int(sys.argv[1]) << 20); print('has it', flush=True); time.sleep(2)"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"


@pytest.mark.skipif(
    not Path("/proc/self/smaps_rollup").exists(), reason="the system does not tell what a process takes"
)
@pytest.mark.parametrize("by_child", [False, True], ids=["itself", "a child"])
@pytest.mark.parametrize(("taken", "ends"), [(20, False), (300, True)])
def test_an_engine_that_takes_more_than_its_memory_is_ended_and_its_log_says_so(
    tmp_path: Path, taken: int, ends: bool, by_child: bool
) -> None:
    words = ["-c", TAKE, str(taken)] if not by_child else ["-c", PARENT, TAKE, str(taken)]
    log = tmp_path / "m.log"
    command = python_command("worker", "engine", str(log), str(150 << 20), sys.executable, *words)
    ended = subprocess.run(command, timeout=60)
    assert ended.returncode == (-signal.SIGKILL if ends else 0)
    assert ("GiB of --engine-memory" in last_lines(log)) is ends
    assert ends or "has it" in log.read_text()
