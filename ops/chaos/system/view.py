"""A farm seen from outside: its state in Redis, and its ranks' processes on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

from control.errors import RedisUnavailable
from control.messages import ModelSpec
from control.placement import farm
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas import health
from control.replicas.health import Beat, Overview, Poison
from ops.chaos.errors import ChaosError
from ops.common.waiting import NotInTime, until
from ops.local.ready import is_ready

TICK_S = 0.01
WHOLE_WITHIN_S = 240.0
EFFECT_WITHIN_S = 30.0

T = TypeVar("T")


class View:
    """A farm that this process did not start; `addresses` are those of its API processes."""

    def __init__(self, spec: ModelSpec, client: SyncRedis, addresses: list[tuple[str, int]]) -> None:
        self.spec, self.client, self.addresses = spec, client, addresses
        self.replica = "r0"
        """The one that is struck. Of two that a fault starts either one may stay."""

    @property
    def urls(self) -> list[str]:
        """Of its API processes."""
        return [f"http://{host}:{port}" for host, port in self.addresses]

    def tend(self) -> None:
        """A duty that `until` calls at each poll."""

    # --- waiting ----------------------------------------------------------------------------------------------------

    def until(
        self, condition: Callable[[], T | None], what: str, seconds: float = EFFECT_WITHIN_S, tick: float = TICK_S
    ) -> T:
        """The first true value of `condition`; a server that can't be reached counts as not yet.

        Raises ChaosError naming `what`.
        """

        def attempt() -> T | None:
            self.tend()
            with suppress(RedisUnavailable):
                return condition()
            return None

        try:
            return until(attempt, what, seconds, tick)
        except NotInTime as error:
            raise ChaosError(str(error)) from error

    def rest(self, seconds: float) -> None:
        """Let the farm run on for a while."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "the end of a rest", seconds + 1.0)

    def whole(self) -> bool:
        """Every rank is ready in the current epoch, and every API process answers."""
        return self.overview().state == "loaded" and all(map(is_ready, self.addresses))

    def wait_until_whole(self, *, standby: bool = False) -> None:
        """`standby`: also until the host has a process ready to take the next dead rank's place."""

        def there() -> bool:
            if (overview := self.overview()).state == "failed":
                raise ChaosError(f"{self.spec.name} was given up: {overview.detail}")
            return self.whole() and (not standby or self.standby_state() == "ready")

        try:
            self.until(there, "the farm is whole again", WHOLE_WITHIN_S)
        except ChaosError as error:
            with suppress(RedisUnavailable):
                raise ChaosError(f"{error}: {self.overview().state}: {self.overview().detail}") from error
            raise

    # --- the state of the farm -------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        return health.overview(self.client, self.spec.name)

    def epoch(self) -> int:
        return health.read_epoch(self.client, self.spec.name, self.replica)

    def beat(self, rank: int) -> Beat | None:
        return health.heartbeats(self.client, self.spec.name, self.replica, self.spec.tp)[rank]

    def poisons(self) -> list[Poison]:
        """The poison of past epochs, newest first."""
        return run(self.client, health.poison_history(self.spec.name, self.replica))

    def standby_state(self) -> str | None:
        """off, starting or ready; None where no host beats."""
        return next(iter(farm.standbys(self.client)), None)

    # --- processes --------------------------------------------------------------------------------------------------

    def rank_pids(self) -> dict[int, int]:
        """The ranks that beat and whose processes live on this machine."""
        beats = health.heartbeats(self.client, self.spec.name, self.replica, self.spec.tp)
        return {rank: beat.pid for rank, beat in enumerate(beats) if beat is not None and lives_as(rank, beat.pid)}

    def rank_pid(self, rank: int) -> int:
        """The rank's process; waits if it is just being started."""
        return self.until(lambda: self.rank_pids().get(rank), f"rank {rank} has a process", WHOLE_WITHIN_S)

    def send(self, pid: int, number: signal.Signals) -> None:
        """As `kill`; a process that has just ended is no error here, because the proof will be missing."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def lives_as(rank: int, pid: int) -> bool:
    """True if the process exists on this machine and has the name of that rank."""
    try:
        process = psutil.Process(pid)
        return process.name() == f"furrow-rank-{rank}" and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
