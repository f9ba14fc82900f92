"""The life of a leader process: it holds its replica's lock, serves, and starts over in a new epoch when one ends."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from control import requests
from control.backoff import doubling, pause_after
from control.errors import EpochOver, Fenced, Lost, Poisoned, RedisUnavailable
from control.messages import Assignment
from control.records import catalog
from control.records.backend import Backend, put_backend
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run
from control.redis.outage import outage
from control.replicas import health
from control.replicas.lease import Lease, acquire, release
from worker.leader.exchange import LOOP, BackgroundCall, Exchange
from worker.leader.request_loop import PEER_FAILED, STEP_FAILED, RequestLoop, StopSignals
from worker.rank.counters import Counters

log = structlog.get_logger()

POLL_S = 0.05
"""Interval between attempts to take the lock."""
DISPLACED_S = 5.0
"""A lock that is held for longer is another leader's, not one that this host's last process left."""
PAUSES_S = doubling(0.1, 5.0)
"""Pauses between epochs that end in their first step."""


class Backoff:
    """The pause before the next epoch when epochs keep ending in their first step: a fault that repeats must not spin.

    It grows from epoch to epoch; one that completed a step, or ended for another reason, starts it over.
    """

    def __init__(self) -> None:
        self._fruitless = 0

    def after(self, *, steps: int, failed: bool) -> float:
        """Seconds to wait after an epoch that completed `steps` steps and ended in a step that `failed`."""
        if steps or not failed:
            self._fruitless = 0
            return 0.0
        self._fruitless += 1
        return pause_after(self._fruitless, PAUSES_S)


class Leader(ABC):
    """One leader process's life over all its epochs. What it leads is a subclass's: a group of ranks, or an external
    engine."""

    def __init__(
        self,
        clients: tuple[SyncRedis, SyncRedis, SyncRedis],
        assignment: Assignment,
        owner: str,
        weights: str,
        world_size: int,
        counters: Counters | None = None,
    ) -> None:
        """`clients`: for calls, for blocking calls, for the heartbeat. `owner`: HOST/PID, for the lock. `weights`: the
        fingerprint that every replica of the model has to have. `world_size`: the number of its ranks."""
        self._client, self._blocking, self._heartbeat_client = clients
        self._spec = assignment.spec
        self._replica = assignment.replica
        self._owner = owner
        self._weights = weights
        self._world_size = world_size
        self._counters = counters or Counters()
        self._backoff = Backoff()
        self._steps = 0
        self._trying = False
        self._epoch = 0
        self.signals = StopSignals()

    def stop(self) -> None:
        """Let `run` return soon."""
        self.signals.stopping = True

    def wake(self) -> None:
        """Have `run` look at its signals now, if it waits for requests; without this it looks after IDLE_BLOCK_MS."""
        with suppress(RedisUnavailable):
            run(self._client, catalog.ring(self._spec.name, "stop"))

    def run(self) -> None:
        """Serve until stopped. Raises GroupError if the group can't be formed or the model not loaded."""
        while not self.signals.stopping:
            lease = self._acquire()
            if lease is None:
                return
            self._epoch = lease.epoch
            structlog.contextvars.bind_contextvars(epoch=lease.epoch)
            log.info("leads", world_size=self._world_size, action="begin_epoch")
            self._steps = 0
            self._trying = False
            pause = 0.0
            try:
                self._serve(lease)
            except RedisUnavailable as error:  # where nothing holds out for it the epoch ends, and the process stays
                log.warning("left the epoch", reason=str(error), action="leave_epoch")
            except EpochOver as over:
                log.warning("left the epoch", reason=str(over), action="leave_epoch")
                failed = isinstance(over, Poisoned) and over.kind in (STEP_FAILED, PEER_FAILED)
                # A trial that crashed is followed by a smaller one, so it can't go on for ever: no rest.
                pause = self._backoff.after(steps=self._steps, failed=failed and not self._trying)
            finally:
                self._leave(lease)
            self._rest(pause)

    @abstractmethod
    def _serve(self, lease: Lease) -> None:
        """Serve in one epoch until it ends, or `signals` say so. It sets `_steps`, the number of emissions that Redis
        has answered, and `_trying`, whether the last step was a trial. Raises EpochOver or RedisUnavailable."""

    @abstractmethod
    def _quit(self) -> None:
        """Leave the epoch on this process's side; the lock is released after it."""

    def _rest(self, seconds: float) -> None:
        """Let a fault that repeats rest, without the lock, so that a healthier process may take it."""
        if seconds:
            log.warning("first step of the epoch failed", pause_s=seconds, action="back_off")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.signals.stopping:
            time.sleep(POLL_S)

    def _acquire(self) -> Lease | None:
        """Wait for the lock; None when stopped, or when draining while another one leads for good."""
        waited = False
        begun = time.monotonic()
        while not self.signals.stopping:
            try:
                call = acquire(
                    self._spec.name,
                    self._replica,
                    self._owner,
                    self._world_size,
                    floor=self._epoch,
                    weights=self._weights,
                )
                lease = run(self._client, call)
                outage.goes_on(LOOP)
                if lease is not None:
                    return lease
                if not waited:
                    log.info("waiting for the lock", action="acquire")
                    waited = True
                if self.signals.draining and time.monotonic() - begun > DISPLACED_S:
                    return None
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
            time.sleep(POLL_S)
        return None

    def _leave(self, lease: Lease) -> None:
        self._quit()
        try:
            run(self._client, release(lease))
        except RedisUnavailable as error:  # it lapses by itself
            outage.waits(LOOP, error)

    def _run_loop(self, loop: RequestLoop, exchange: Exchange, lease: Lease, finish: Callable[[], None]) -> None:
        """Serve until stopped; then return the rest to the queue, and `finish`. Raises EpochOver."""
        counting = BackgroundCall[bool]("recount")
        try:
            with exchange:  # and before the poison, which Redis would refuse the last tokens for
                loop.adopt()
                counting.send(lambda: requests.recount(self._client, lease.model))
                loop.run()
                loop.give_back()  # to the queue, where the next epoch or another replica finds it
                finish()
                self.signals.stopping = True
        except EpochOver as over:
            if not isinstance(over, Fenced | Lost):
                self._poison(lease, getattr(over, "kind", "epoch_over"), str(over), getattr(over, "rank", 0))
            raise
        finally:
            counting.close()
            self._steps = exchange.answers
            self._trying = loop.trying

    def _records(self, backend: Backend | None) -> list[Call[Any]]:
        """The calls that publish what other replicas need of this one before it claims."""
        name = self._spec.name
        assigned = catalog.Assigned(revision=self._spec.revision, tp=self._world_size)
        return [
            catalog.put_replica(name, self._replica, assigned),
            catalog.put_weights(name, self._replica, self._weights),
            put_backend(name, self._replica, backend),
        ]

    def _poison(self, lease: Lease, kind: str, message: str, rank: int = 0) -> None:
        try:
            health.write_poison(self._client, lease.model, lease.replica, lease.epoch, rank, kind, message)
        except RedisUnavailable as error:
            log.warning("could not publish the poison", error=str(error), action="poison")
