"""A stalled external engine is detected: whatever its own interface says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.waiting import until
from worker.agent import failure_detector as failure_detector_module
from worker.agent.failure_detector import EngineStall
from worker.agent.supervision.children import Children
from worker.agent.supervision.wire import AT_ONCE


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "100"]) as process:
        yield process
        process.kill()


def test_an_engine_that_a_signal_holds_is_stopped(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_detector_module, "STOPPED_S", 0.2)
    stall = EngineStall()
    assert stall.judge(sleeper.pid, loads=False) == ""
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: "stopped" in stall.judge(sleeper.pid, loads=False), 20.0)
    sleeper.send_signal(signal.SIGCONT)
    until(lambda: stall.judge(sleeper.pid, loads=False) == "", 20.0)


def test_an_engine_that_loads_without_a_processor_is_stalled(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that serves may well be idle."""
    monkeypatch.setattr(failure_detector_module, "LOAD_STALL_S", 0.3)
    stall = EngineStall()
    until(lambda: "used no processor" in stall.judge(sleeper.pid, loads=True), 20.0)
    assert stall.judge(sleeper.pid, loads=False) == ""


def test_an_engine_that_computes_is_not_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector_module, "LOAD_STALL_S", 3.0)
    stall = EngineStall()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            ends = time.monotonic() + 5.0
            while time.monotonic() < ends:
                assert stall.judge(process.pid, loads=True) == ""
                time.sleep(0.2)
        finally:
            process.kill()


def test_the_processes_of_an_engine_end_with_it() -> None:
    """A server of vLLM has its engine in a process of its own, which would keep the memory."""
    script = "import os, subprocess, time\nos.setsid()\nsubprocess.Popen(['sleep', '100'])\ntime.sleep(100)\n"
    children = Children()
    command = [sys.executable, "-c", script]
    pid = children.spawn(command, dict(os.environ), {"kind": "engine"}, AT_ONCE, channel=False)
    sleeping = until(lambda: _children_of(pid), 20.0)
    children.signal(pid, signal.SIGKILL)
    _, code = os.waitpid(pid, 0)
    assert children.ended(pid, os.waitstatus_to_exitcode(code))
    until(lambda: not any(_lives(one) for one in sleeping), 20.0)


def _children_of(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children() if child.name() == "sleep"]


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
