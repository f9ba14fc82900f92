"""A child process never outlives its parent: however the parent ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from control.process import child_environment, python_command
from tests.farm import clean_environment
from tests.waiting import lives, until

CHILD = "from control.process import die_with_parent; {call}; import time; open({path!r}, 'w').close(); time.sleep(60)"

PARENT = """
import subprocess, sys, time
from control.process import child_environment, python_command
child = subprocess.Popen([sys.executable, "-c", {child!r}], env=child_environment())
print(child.pid, flush=True)
time.sleep(60)
"""


def family(tmp_path: Path, call: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A parent and its child, both running; the child has made its arrangements."""
    ready = tmp_path / "ready"
    code = PARENT.format(child=CHILD.format(call=call, path=str(ready)))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.stdout.close()
    until(ready.exists, 40.0)
    return parent, child


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_dies_with_its_parent(tmp_path: Path, how: signal.Signals) -> None:
    """Killed without a chance to clean up, an agent still leaves no rank behind."""
    parent, child = family(tmp_path, "die_with_parent()")
    parent.send_signal(how)
    parent.wait(40)
    until(lambda: not lives(child), 40.0)


def test_without_the_arrangement_a_child_would_stay(tmp_path: Path) -> None:
    """The control: the same child that makes no arrangement is an orphan."""
    parent, child = family(tmp_path, "None")
    try:
        parent.kill()
        parent.wait(40)
        assert lives(child)
    finally:
        child.kill()


def test_a_child_whose_parent_died_first_ends_at_once() -> None:
    """Between the fork and the arrangement the parent may end; the child notices that it was not in time."""
    environment = child_environment() | {"FURROW_PARENT": str(os.getpid() + 1)}
    code = "from control.process import die_with_parent; die_with_parent(); raise SystemExit(7)"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, timeout=40, check=False)
    assert ended.returncode == 0


@pytest.mark.parametrize("verb", [["api", "--port", "0"], ["worker"]], ids=lambda verb: verb[0])
def test_files_of_the_working_folder_are_not_imported(tmp_path: Path, verb: list[str]) -> None:
    """A user's `random.py`, or one that somebody left in a shared folder, is no part of Furrow."""
    for name in ("random", "h2", "structlog", "msgspec", "control", "worker", "api"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working folder')\n")
    ended = subprocess.run(
        python_command("ops.cli", *verb, "--redis", "redis://127.0.0.1:1/0"),
        cwd=tmp_path,
        env=clean_environment(FURROW_REDIS_WAIT="0"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "imported from the working folder" not in ended.stdout + ended.stderr
    assert "can't be reached" in ended.stderr, ended.stderr
