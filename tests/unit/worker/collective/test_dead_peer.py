"""A rank notices a dead peer: a process that has ended, seen from a rank that waits for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from control.errors import CollectiveFailed
from tests.unit.worker.collective.groups import group
from worker.collective.shared_memory import Peers


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that only waits."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        yield process
        process.kill()


@pytest.mark.parametrize("before", [True, False])
def test_a_dead_peer_is_an_error_naming_it(process: subprocess.Popen[bytes], before: bool) -> None:
    """A peer's death is found before and during a wait, also if its process is a zombie."""
    with group(2, pids=[os.getpid(), process.pid]) as threads:
        if before:
            process.send_signal(signal.SIGKILL)
        waiting = threads.pool.submit(threads.ranks[0].all_reduce, torch.ones(1))
        process.send_signal(signal.SIGKILL)
        with pytest.raises(CollectiveFailed, match=rf"rank 1 \(pid {process.pid}\) has died"):
            waiting.result()


def test_what_a_peer_left_before_its_end_counts(process: subprocess.Popen[bytes]) -> None:
    """The data of a rank are there for the others, though it died before they read them."""
    with group(2, pids=[os.getpid(), process.pid]) as threads:
        given = torch.arange(3.0)
        threads.ranks[1].broadcast(given, 1)
        process.kill()
        process.wait()
        assert torch.equal(threads.ranks[0].broadcast(torch.zeros(3), 1), given)


def test_a_process_that_is_gone_can_t_be_watched(process: subprocess.Popen[bytes]) -> None:
    """It is an error of the system, as it is where processes can't be watched at all."""
    process.kill()
    process.wait()
    with pytest.raises(OSError):
        Peers([os.getpid(), process.pid], 0)
