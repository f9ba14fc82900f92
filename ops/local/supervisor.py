"""The parts that `furrow serve` runs as one: started together, restarted when they die, stopped in order."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from control.process import child_environment, python_command

RESTART_PAUSE_S = 1.0
STOP_LIMIT_S = 90.0
STOP_TICK_S = 0.02


@dataclass
class Part:
    """One child process: `python -m module arguments`."""

    name: str
    module: str
    arguments: list[str]
    stop_limit_s: float = STOP_LIMIT_S
    process: subprocess.Popen[bytes] | None = None
    restart_at: float = 0.0


@dataclass
class Supervisor:
    """Runs parts in the order given and stops them in the reverse order. Use from one thread that lives as long."""

    environment: dict[str, str]
    say: Callable[[str], None]
    log: IO[bytes] | None = None
    """Destination of the parts' output; None: this process's own."""
    parts: list[Part] = field(default_factory=list)

    def start(self, part: Part) -> None:
        """Start `part` and keep it running."""
        self.parts.append(part)
        self._spawn(part)

    def _spawn(self, part: Part) -> None:
        command = python_command(part.module, *part.arguments)
        environment = child_environment(**self.environment)
        part.process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdout=self.log, stderr=self.log
        )

    def tend(self) -> None:
        """Restart parts that died, after a short pause."""
        for part in self.parts:
            if part.process is None:
                if time.monotonic() >= part.restart_at:
                    self._spawn(part)
            elif part.process.poll() is not None:
                self.say(f"{part.name} ended with status {part.process.returncode}; starting it again")
                part.process, part.restart_at = None, time.monotonic() + RESTART_PAUSE_S

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Stop the parts in reverse order, one by one: SIGTERM, then SIGKILL past its limit or once `hurry()`."""
        for part in reversed(self.parts):
            if part.process is not None:
                part.process.send_signal(signal.SIGTERM)
                self._wait(part, part.process, hurry)
        self.parts.clear()

    def _wait(self, part: Part, process: subprocess.Popen[bytes], hurry: Callable[[], bool]) -> None:
        limit = time.monotonic() + part.stop_limit_s
        while process.poll() is None:
            if hurry() or time.monotonic() > limit:
                self.say(f"{part.name} did not stop in time and is killed")
                process.kill()
                process.wait()
                return
            time.sleep(STOP_TICK_S)
