"""The count of files that a step runs through."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ops.bench.house import Recordings, recording

PROGRAM = """
import sys
from control import clock
from control.text import text
import control.keys
print("imported", flush=True)
for line in sys.stdin:
    clock.now_ms()
    print("called", flush=True)
"""


def test_files_of_the_time_that_is_asked_for_count(tmp_path: Path) -> None:
    """Only those of which a function runs: not those that are imported, nor what ran before."""
    environment = {**os.environ, **recording(tmp_path)}
    recordings = Recordings(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[4],
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "imported\n"
        for name in ("", "step"):
            recordings.label(name)
            process.stdin.write("call\n")
            process.stdin.flush()
            assert process.stdout.readline() == "called\n"
        recordings.label("")
        process.stdin.close()
    assert recordings.of("python", "step") == ["control/clock.py"]
