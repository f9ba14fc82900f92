"""The standby process: imports all modules of a rank, and forks ranks. Touches no device.

It has no threads while it forks. It imports in a thread, which ends before that: beside ranks that serve, the thread
has a lower priority. A fork copies one thread and no context of a GPU, so nothing is forked beside a second thread,
CUDA or an open device file.

It forks twice, and the supervisor, a subreaper, becomes the rank's parent, so pid, exit status and death with the
parent work as for a spawned process. The supervisor itself can't fork ranks: it would import torch, and must not fail.
`clone(CLONE_PARENT)` bypasses what libc and Python do at a fork. Ranks of a host share the layout of their address
space and Python's hash seed.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from control import logs
from control.process import die_with_parent, name_process
from control.settings import Settings
from worker.agent.standby import Prepare, StandbyModel, ready_line
from worker.agent.supervision.fork_server import serve_forks
from worker.agent.supervision.wire import take_channel

log = structlog.get_logger()

NICENESS = 10


def await_duty(background: bool) -> dict[str, str] | None:
    """Import, report, and fork. Returns the environment of the rank to be in each forked process, and None in this one
    if the agent needs no more. Raises any error of an import."""
    channel = take_channel()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name_process("furrow-standby")
    settings = Settings.from_environment()
    logs.configure(settings.log_format, settings.log_level)
    gc.disable()  # a rank enables it
    in_thread(import_all, background)
    say = partial(tell_supervisor, channel)
    say(ready_line())

    def prepare(line: str) -> None:
        message = msgspec.json.decode(line, type=Prepare)
        in_thread(partial(prepare_model, message.model, message.in_use), message.background)
        say(ready_line(message.model))

    line = serve_forks(channel, prepare)
    if line is None:
        return None
    duty = msgspec.json.decode(line, type=dict[str, str])
    log.info("forked", rank=duty["FURROW_RANK"], action="fork")
    return duty


def tell_supervisor(channel: socket.socket, line: bytes) -> None:
    """Send a line. A supervisor that has ended meanwhile is noticed at the next read."""
    with suppress(OSError):
        channel.sendall(line)


def in_thread(work: Callable[[], None], background: bool) -> None:
    """Call `work` in a thread, of lower priority where it is for the `background`. Niceness belongs to a thread and
    can't be raised again without privilege, so the main thread, and torch's later threads, keep their own."""
    failed: list[BaseException] = []

    def call() -> None:
        try:
            if background and sys.platform == "linux":
                os.nice(NICENESS)
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, name="imports")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def import_all() -> None:
    """Import all modules of a rank."""
    import worker.rank_process  # noqa: F401


def prepare_model(model: StandbyModel, in_use: Collection[StandbyModel] = ()) -> None:
    """Build the model once without weights, for which its code is imported, and the vocabulary of one that leads."""
    from worker.models.loading import prepare
    from worker.repository import validation
    from worker.repository.assets import read_assets
    from worker.repository.pooling import pooling_of
    from worker.sampling import grammars

    grammars.keep_prepared({used.folder for used in in_use if used.leads})
    try:
        files = validation.inspect(Path(model.folder), images=False)
        prepare(files.config, model.dtype, model.device)
        if model.leads and pooling_of(files.config) is None:
            grammars.prepare(model.folder, read_assets(files, None))
    except Exception as error:  # the rank that loads it will say what is wrong with it
        log.warning(
            "standby could not prepare a model", folder=model.folder, error=str(error), action="standby_prepare"
        )
