"""The process between a host's supervisor and an external engine: whoever is killed, nothing of the engine stays.

An engine may have processes of its own, which its death or that of the supervisor would leave behind with their memory.
This process leads their group. It ends as the engine ends, and ends the group where the supervisor is gone.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from control.process import name_process

LOOK_S = 0.1
"""Between two looks at the supervisor."""
MEMORY_LOOK_S = 0.5
"""Between two looks at the memory of the engine."""
_SIZE = re.compile(r"^(?:Pss_Anon|Pss_Shmem|SwapPss): +(\d+) kB$", re.MULTILINE)
NOT_RUN = 127
"""Exit status where the program can't be run, as a shell's."""


def hold(log_path: str, memory: int, command: list[str]) -> int:
    """Run an engine with its output in a log file; the exit status, or the end by the engine's own signal. It is ended
    where its processes take more than `memory` bytes; 0: that is not limited."""
    parent = os.getppid()
    name_process("furrow-engine")
    os.setsid()
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)  # the engine gets it too, and ends as it likes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = _log(Path(log_path))
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FURROW_")}
    try:
        engine = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    except OSError as error:
        os.write(output, f"{command[0]} can't be run: {error}\n".encode())
        return NOT_RUN
    next_look = 0.0
    while engine.poll() is None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)
        if memory and time.monotonic() >= next_look:
            own_memory = memory_of(os.getpid())
            if own_memory > memory:
                limit = f"{memory / 2**30:.2f} GiB of --engine-memory"
                os.write(
                    output, f"The engine took {own_memory / 2**30:.2f} GiB of memory, more than the {limit}.\n".encode()
                )
                os.killpg(0, signal.SIGKILL)
            next_look = time.monotonic() + MEMORY_LOOK_S
        with suppress(subprocess.TimeoutExpired):
            engine.wait(LOOK_S)
    if engine.returncode < 0:
        _end_by(-engine.returncode)
    return engine.returncode


def memory_of(pid: int) -> int:
    """Bytes that a process and its children take of the machine: what is shared counts once, and mapped files, whose
    pages the kernel may drop, count nothing. 0 where the system does not tell it."""
    total = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(OSError):  # it has just ended, or the system has no such file
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += sum(1024 * int(size) for size in _SIZE.findall(rollup))
    return total


def _log(path: Path) -> int:
    """A new log for this user alone; the one before it is kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_suffix(".before.log"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)


def _end_by(number: int) -> None:
    """End this process by a signal, as its engine was, without a second core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    time.sleep(1.0)
