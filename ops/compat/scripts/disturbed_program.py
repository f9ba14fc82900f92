"""A program that runs to its end while a fault of the leader falls into one of its requests."""

from __future__ import annotations

import subprocess
import threading

from checks import inject

LIMIT_S = 120.0


def run_disturbed(command: list[str], folder: str, fault: str = "", settings: dict[str, str] | None = None) -> None:
    """Run `command` in `folder` with the environment `settings` (None: this one's). `fault` as `inject` takes it.

    Raises AssertionError with the program's last words where it fails, and TimeoutExpired.
    """
    disturbing = threading.Thread(target=inject, args=(fault,)) if fault else None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=settings
    ) as process:
        if disturbing:
            disturbing.start()
        try:
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    if disturbing:
        disturbing.join()
    assert process.returncode == 0, said[-280:]
