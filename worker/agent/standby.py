"""The host's standby, seen from its agent: one process that has imported everything, and forks the host's ranks.

Nearly all of a rank's start, 2 to 3 s, is importing torch, and transformers where a model needs it. A fork takes 6 ms,
and shares most of the memory that imports took, some 150 MiB. Without a standby (`FURROW_STANDBY=0`, no Linux), after
120 s of waiting, or after a failed fork, a rank starts in a process of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Literal, NamedTuple

import msgspec
import structlog

from control.process import python_command
from control.version import VERSION
from worker.agent.supervision.client import ChildProcess, SupervisorClient
from worker.agent.supervision.wire import AT_ONCE, Ending, Tag

log = structlog.get_logger()

RETRY_S = 10.0
"""Pause between the death of a standby and the next start."""
AWAIT_S = 120.0
"""Limit of the time for which a rank waits for the standby's imports, on a slow disk, instead of its own."""
READY = "ready"
"""Begin of each line that the standby writes to its channel: once it has imported a rank's modules, and for each model
that it was asked to prepare, which follows as JSON."""
TAG: Tag = {"kind": "standby", "version": VERSION}


class StandbyModel(NamedTuple):
    """A model whose code a standby imports: its folder, and how ranks of this host serve it."""

    folder: str
    dtype: str
    device: str
    leads: bool = True
    """True if the leader is one of them: the standby then makes its vocabulary too."""


class Prepare(msgspec.Struct):
    """The line that asks a standby to prepare a model, in the `background` beside ranks that serve. It releases what it
    made for models that are not `in_use`."""

    model: StandbyModel
    background: bool
    in_use: list[StandbyModel]


StandbyState = Literal["off", "starting", "ready"]


def ready_line(model: StandbyModel | None = None) -> bytes:
    """A line as READY describes."""
    return READY.encode() + (b" " + msgspec.json.encode(model) if model else b"") + b"\n"


def rank_environment(redis_url: str) -> dict[str, str]:
    """The environment with which every rank process begins, a standby too; its duty is what is added for one rank."""
    # Threads that wait for each other by spinning slow a busy machine's decode down more than tenfold.
    policy = os.environ.get("OMP_WAIT_POLICY", "passive")
    return {**os.environ, "FURROW_REDIS_URL": redis_url, "OMP_WAIT_POLICY": policy}


class Standby:
    """At most one process, a child of the host's supervisor."""

    def __init__(self, redis_url: str, supervisor: SupervisorClient) -> None:
        self._redis_url = redis_url
        self._supervisor = supervisor
        self._process: ChildProcess | None = None
        self._requested: set[StandbyModel] = set()
        self._in_use: set[StandbyModel] = set()
        self._background = self._is_announced = False
        self._due = self._await_by = 0.0

    @property
    def state(self) -> StandbyState:
        """`ready` where it would fork now."""
        process = self._process
        if process is None or process.poll() is not None:
            return "off"
        return "ready" if READY in process.said and self._requested <= self._prepared else "starting"

    @property
    def _prepared(self) -> set[StandbyModel]:
        """The models that the process has said it has prepared."""
        lines = self._process.said if self._process is not None else []
        models = [line.removeprefix(f"{READY} ") for line in lines if line != READY]
        return {msgspec.json.decode(model, type=StandbyModel) for model in models}

    def adopt(self, process: ChildProcess) -> None:
        """Keep the standby that an earlier agent started; one of another version ends."""
        if self._process is not None or process.tag != TAG:
            process.kill()
            return
        log.info("standby adopted", pid=process.pid, action="adopt")
        self._process = process

    def tend(self, models: Collection[StandbyModel] = (), *, serving: bool) -> None:
        """Note that it is ready, or has died; start one when there is none, which prepares `models`, those in use.

        Beside ranks that are `serving` it imports and prepares at low priority.
        """
        self._in_use = set(models)
        if self._process is not None and self._process.poll() is not None:
            log.warning("standby died", pid=self._process.pid, action="standby_exit")
            self._due = time.monotonic() + RETRY_S
            self._process.forget()
            self._process = None
        if self._process is None and time.monotonic() >= self._due:
            self._spawn(serving)
            for model in models:
                self._prepare(model, serving)
        elif self.state == "ready":
            if not self._is_announced:
                log.info("standby ready", action="standby_start")
                self._is_announced = True
            if serving:
                for model in sorted(self._in_use - self._prepared):
                    self._prepare(model, background=True)

    def awaited(self, model: StandbyModel) -> bool:
        """True while a rank of `model` is to wait for it: its imports are sooner over than the rank's own would be.

        The rank waits for the model's code alone. The first leader makes its own vocabulary beside the weights, and the
        standby prepares that for later ones once the ranks serve (`tend`).
        """
        code = model._replace(leads=False)
        if self.state == "ready" and not self._prepared & {model, code}:
            self._prepare(code, background=False)
        return self.state == "starting" and not self._background and time.monotonic() < self._await_by

    def fork(self, duty: dict[str, str], tag: Tag, ending: Ending) -> ChildProcess | None:
        """The rank that `duty` describes, as environment; None where there is no standby to fork it."""
        process = self._process
        if process is None or self.state != "ready":
            return None
        try:
            return process.fork(msgspec.json.encode(duty).decode(), tag, ending)
        except OSError as error:
            log.error("the standby forked no rank", pid=process.pid, error=str(error), action="fork")
            process.kill()  # one that hangs or has threads is of no use; `tend` starts another
            return None

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process.forget()
            self._process = None

    def _spawn(self, background: bool) -> None:
        command = python_command("worker", "standby", *(["background"] if background else []))
        # Its threads would be there before the first fork. Only numpy uses it, which no rank computes with.
        environment = rank_environment(self._redis_url) | {"OPENBLAS_NUM_THREADS": "1"}
        self._requested, self._is_announced = set(), False
        self._wait(background)
        self._process = self._supervisor.spawn(command, environment, TAG, AT_ONCE, channel=True)
        log.info("standby started", pid=self._process.pid, action="standby_start")

    def _prepare(self, model: StandbyModel, background: bool) -> None:
        assert self._process is not None
        try:
            in_use = sorted(self._in_use | {model})
            self._process.tell(msgspec.json.encode(Prepare(model, background, in_use)).decode())
        except OSError:  # it died this very moment, which `tend` will find
            return
        self._requested.add(model)
        self._wait(background)

    def _wait(self, background: bool) -> None:
        self._background, self._await_by = background, time.monotonic() + AWAIT_S
