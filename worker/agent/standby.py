"""The host's standby, seen from its agent: one process that has imported everything and waits to become a rank.

Nearly all of a respawn is importing torch, and transformers where a model needs it. The standby has done that before
anything died.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Literal, NamedTuple

import msgspec
import structlog

from control.process import python_command
from worker.supervision.client import ChildProcess, SupervisorClient
from worker.supervision.version import VERSION
from worker.supervision.wire import AT_ONCE, Ending, Tag

log = structlog.get_logger()

RETRY_S = 10.0
"""Pause between the death of a standby and the next start."""
READY = "ready"
"""The line that the standby writes to its standard input, a socket, when it has imported everything; then it waits
there for one line, its duty as JSON."""
TAG: Tag = {"kind": "standby", "version": VERSION}


class Preparation(NamedTuple):
    """A model whose code a standby imports: its folder, and how ranks of this host serve it."""

    folder: str
    dtype: str
    device: str


StandbyState = Literal["off", "starting", "ready"]


def rank_environment(redis_url: str) -> dict[str, str]:
    """The environment with which every rank process begins, a standby too; its duty is what is added for one rank."""
    # Threads that wait for each other by spinning slow a busy machine's decode down more than tenfold.
    policy = os.environ.get("OMP_WAIT_POLICY", "passive")
    return {**os.environ, "FURROW_REDIS_URL": redis_url, "OMP_WAIT_POLICY": policy}


class Standby:
    """At most one process, a child of the host's supervisor."""

    def __init__(self, redis_url: str, supervisor: SupervisorClient) -> None:
        self._redis_url, self._supervisor = redis_url, supervisor
        self._process: ChildProcess | None = None
        self._told = False
        self._due = 0.0

    @property
    def state(self) -> StandbyState:
        if self._process is None:
            return "off"
        return "ready" if READY in self._process.said else "starting"

    def adopt(self, process: ChildProcess) -> None:
        """Keep the standby that an earlier agent started; one of another version ends."""
        if self._process is not None or process.tag != TAG:
            process.kill()
            return
        log.info("standby adopted", pid=process.pid, action="adopt")
        self._process, self._told = process, False

    def tend(self, models: Collection[Preparation], calm: bool) -> None:
        """Note that it is ready, or has died; start one when there is none and the host is `calm`.

        `models` are those in use, whose code it imports too.
        """
        if self._process is not None and self._process.poll() is not None:
            log.warning("standby died", pid=self._process.pid, action="standby_exit")
            self._due = time.monotonic() + RETRY_S
            self._process.forget()
            self._process = None
        if self._process is not None and self.state == "ready" and not self._told:
            log.info("standby ready", pid=self._process.pid, action="standby_start")
            self._told = True
        if self._process is None and calm and time.monotonic() >= self._due:
            self._spawn(models)

    def take(self, duty: dict[str, str], tag: Tag, ending: Ending) -> ChildProcess | None:
        """Make it the rank that `duty` describes, as environment; None where there is none to take.

        The process is the caller's from then on, to be waited for like any other rank.
        """
        process = self._process
        # One that is not ready may be far from it, and imports at low priority.
        if process is None or process.poll() is not None or self.state != "ready":
            return None
        try:
            process.give(msgspec.json.encode(duty).decode(), tag, ending)
        except OSError:  # it died this very moment, which `tend` will find
            return None
        self._process = None
        return process

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.forget()
            self._process = None

    def _spawn(self, models: Collection[Preparation]) -> None:
        command = python_command("worker", "standby", *(word for model in models for word in model))
        environment = rank_environment(self._redis_url)
        self._process = self._supervisor.spawn(command, environment, TAG, AT_ONCE, channel=True)
        self._told = False
        log.info("standby started", pid=self._process.pid, action="standby_start")
