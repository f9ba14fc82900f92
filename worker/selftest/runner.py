"""Runs trials in child processes with a time limit. After a death, a hang or a failure another child tries the rest."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable

import msgspec

from control.errors import FurrowError
from control.process import child_environment, python_command
from worker.selftest.records import TrialResult
from worker.selftest.shapes import Shapes

# Messages between a process that wants trials and the child process that runs them.


TRIALS: dict[str, str] = {
    "triton.norm": "worker.models.torch.kernels.trials:norm",
    "triton.gate": "worker.models.torch.kernels.trials:gate",
    "triton.rotary": "worker.models.torch.kernels.trials:rotary",
    "triton.store": "worker.kv.torch.trials:store",
    "triton.decode": "worker.kv.torch.trials:decode",
    "triton.prefill": "worker.kv.torch.trials:prefill",
    "graphs": "worker.engine.torch.trials:graphs",
    "cpp": "worker.models.torch.trials:cpp",
    "collective.native": "worker.collective.torch.trials:native",
    "collective.nccl": "worker.collective.torch.trials:nccl",
}
"""Name of a kernel → module and function of its trial."""


class TrialTask(msgspec.Struct, frozen=True):
    """Trials for one device; `pipe` is the descriptor that gets a line of JSON for each `Message`."""

    device: str
    shapes: Shapes
    tokens: int
    measured: bool
    trials: dict[str, str]
    pipe: int = -1


class Begun(msgspec.Struct, tag="begun"):
    kernel: str


class Tried(msgspec.Struct, tag="tried"):
    result: TrialResult


class Done(msgspec.Struct, tag="done"):
    kernel: str


Message = Begun | Tried | Done


START_WITHIN_S = 90.0
"""For a child to import torch and reach its device, on a slow machine."""
TRIAL_WITHIN_S = 90.0
"""For one trial, the compilation of its kernels included; less than what the leader grants a load that stands still."""


class Late:
    """The trial sent no result in time."""


LATE = Late()
decode = msgspec.json.Decoder(Message)


class NotTried(FurrowError):
    """A child process did not get as far as its first trial."""


def run(
    task: TrialTask, tell: Callable[[TrialResult], None] = lambda result: None, within_s: float = TRIAL_WITHIN_S
) -> list[TrialResult]:
    """The results of all trials of `task`, each also given to `tell` as it comes. Raises NotTried."""
    results: list[TrialResult] = []
    pending = dict(task.trials)
    while pending:
        for result in _Child(msgspec.structs.replace(task, trials=pending), within_s).results(pending):
            results.append(result)
            tell(result)
    return results


class _Child:
    def __init__(self, task: TrialTask, within_s: float) -> None:
        self._task = task
        self._within_s = within_s
        self._current: str | None = None
        self._partial_line = b""

    def results(self, pending: dict[str, str]) -> list[TrialResult]:
        """Takes what was tried out of `pending`."""
        reader, writer = os.pipe()
        with tempfile.TemporaryFile() as output:
            child = subprocess.Popen(
                python_command("worker.selftest"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                env=child_environment(),
            )
            try:
                os.close(writer)
                assert child.stdin is not None
                child.stdin.write(msgspec.json.encode(msgspec.structs.replace(self._task, pipe=writer)))
                child.stdin.close()
                return self._receive(child, reader, pending, output.fileno())
            finally:
                child.kill()
                child.wait()
                os.close(reader)

    def _receive(
        self, child: subprocess.Popen[bytes], reader: int, pending: dict[str, str], output: int
    ) -> list[TrialResult]:
        results: list[TrialResult] = []
        while (message := self._next(reader)) is not None:
            match message:
                case Begun(kernel):
                    self._current = kernel
                    del pending[kernel]
                case Tried(result):
                    results.append(result)
                case Done():
                    self._current = None
                case Late():
                    if self._current is None:
                        raise NotTried(f"no trial began within {START_WITHIN_S:g} s")
                    detail = f"after {self._within_s:g} s"
                    return [*results, TrialResult(self._current, "", self._task.shapes.dtype, "timed out", detail)]
        status = child.wait()
        if self._current is None and pending:
            raise NotTried(f"the process for trials ended with status {status}: {_last_line(output)}")
        if self._current is not None and (not results or results[-1].works or results[-1].kernel != self._current):
            ended = signal.Signals(-status).name if status < 0 else f"status {status}, {_last_line(output)}"
            results.append(TrialResult(self._current, "", self._task.shapes.dtype, "faulted", f"({ended})"))
        return results

    def _next(self, reader: int) -> Message | Late | None:
        """The next message; LATE if none comes in time, None at the end."""
        deadline = time.monotonic() + (START_WITHIN_S if self._current is None else self._within_s)
        while b"\n" not in self._partial_line:
            if not select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return LATE
            if not (more := os.read(reader, 65536)):
                return None
            self._partial_line += more
        line, _, self._partial_line = self._partial_line.partition(b"\n")
        return decode.decode(line)


def _last_line(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, 2000, max(0, size - 2000)).decode(errors="replace").strip()
    return text.splitlines()[-1][:300] if text else "without a word"
