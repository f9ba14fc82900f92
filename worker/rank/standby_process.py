"""The standby process: imports all modules of a rank, reports, and waits for its duty. Touches no device.

It imports no torch itself: a thread of lower priority does, beside ranks that serve.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import structlog

from control import logs
from control.process import die_with_parent, name_process
from control.settings import Settings
from worker.agent.standby import READY, Preparation

log = structlog.get_logger()

NICENESS = 10


def await_duty(channel: socket.socket, models: list[Preparation]) -> dict[str, str] | None:
    """Import, report and wait. Returns the environment of the rank to become, or None if the agent needs none. Raises
    any error of an import."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name_process("furrow-standby")
    settings = Settings.from_environment()
    logs.configure(settings.log_format, settings.log_level)
    import_in_background(models)
    with channel:
        channel.sendall(READY.encode() + b"\n")
        line = channel.makefile("rb").readline()
    if not line.endswith(b"\n"):
        return None
    duty = msgspec.json.decode(line, type=dict[str, str])
    log.info("standby takes over a rank", rank=duty["FURROW_RANK"], action="standby_take")
    return duty


def import_in_background(models: list[Preparation]) -> None:
    """Run `import_all` in a thread of lower priority. On Linux niceness belongs to a thread and can't be raised again
    without privilege, so the main thread, and torch's later threads, keep their own."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            if sys.platform == "linux":
                os.nice(NICENESS)
            import_all(models)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="imports")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def import_all(models: list[Preparation]) -> None:
    """Import all modules of a rank, and build `models` once without weights."""
    import worker.rank.process  # noqa: F401  # all of a rank
    from worker.models.loading import prepare
    from worker.repository import validation

    for model in models:
        try:
            prepare(validation.inspect(Path(model.folder)).config, model.dtype, model.device)
        except Exception as error:  # the rank that loads it will say what is wrong with it
            log.warning(
                "standby could not prepare a model", folder=model.folder, error=str(error), action="standby_prepare"
            )
