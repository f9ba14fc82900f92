"""The loop around a leader's requests in one epoch, whatever computes their tokens: claims, emissions, ends.

`RunningRequests` owns what runs, `Exchange` the way to Redis. Neither knows the other: what one of them returns is
handed to the other here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import structlog

from control.messages import RequestState
from control.redis.connection import Call
from control.requests import Claimed, Claims
from worker.leader.exchange import EmissionAnswer, Exchange
from worker.leader.request import RunningRequest
from worker.leader.running_requests import Capacity, RunningRequests
from worker.rank.heartbeat import Progress

log = structlog.get_logger()

STEP_FAILED = "step_failed"
"""Kind of poison after a failed step."""
PEER_FAILED = "peer_failed"
"""Kind of poison after another rank's failure, which the leader met in a collective."""
IDLE_BLOCK_MS = 500
IDLE_PING_S = 5.0


@dataclass
class StopSignals:
    """The stops that signals have requested of a leader's process."""

    stopping: bool = False
    """True if the leader stops at once; another one continues its requests."""
    draining: bool = False
    """True if the leader claims and takes over nothing more, and stops when its requests have ended."""


class RequestLoop(ABC):
    """The loop of one epoch. `run` returns when stopped, and raises EpochOver when the epoch ends. A subclass computes
    the tokens."""

    def __init__(
        self,
        running: RunningRequests,
        exchange: Exchange,
        progress: Progress,
        check: Callable[[], None],
        signals: StopSignals,
    ) -> None:
        """`check` raises EpochOver when the epoch is over."""
        self._running = running
        self._exchange = exchange
        self._progress = progress
        self._check = check
        self._signals = signals
        self._isolation = running.isolation
        self._last_contact = time.monotonic()
        """The time of the last word to what computes."""

    @property
    def busy(self) -> bool:
        return bool(self._running or self._exchange.reader)

    @property
    def trying(self) -> bool:
        """True if the last step was a trial of requests that may have crashed the group."""
        return self._isolation.trying

    def adopt(self) -> None:
        """Adopt the requests of the replica's earlier epochs; once, before the first `run`. The last epoch may have
        crashed, so the group first runs a step without a request, and later crashes count for the requests in them."""
        adopted = self._exchange.adopt()
        if adopted:
            adopted = self._isolation.open(adopted)
            self._prove()
            self._isolation.watch(adopted)
            self._read(adopted)

    def run(self) -> None:
        """Serve until a signal says to stop."""
        while not self._is_over:
            self.turn()
        self.deliver()

    @property
    def _is_over(self) -> bool:
        return self._signals.stopping or (self._signals.draining and not self.busy)

    def turn(self) -> None:
        """One step, or a wait for a request where there is none."""
        self._check()
        self._resume()
        if not (self._isolation.active or self._signals.draining):
            self._take_over()
        if self._running.has_work:
            self._step()
            self._last_contact = time.monotonic()
            return
        self._idle()
        if time.monotonic() - self._last_contact > IDLE_PING_S:
            self._ping()
            self._progress.idle()
            self._running.prepare_grammars()
            self._last_contact = time.monotonic()

    @abstractmethod
    def _step(self) -> None:
        """Get on with what runs."""

    @abstractmethod
    def _prove(self) -> None:
        """Compute a token that belongs to no request: what can't even do this blames none."""

    @abstractmethod
    def _ping(self) -> None:
        """See whether what computes still answers; now and then, while nothing runs."""

    def give_back(self) -> None:
        """Put every request back into its queue; another epoch continues it from its log. Raises RedisUnavailable."""
        for rid in [*self._running.by_rid, *self._exchange.reader.rids]:
            self._exchange.requeue(rid)
            self._forget(rid)

    # --- emissions --------------------------------------------------------------------------------------------------

    def emit(self, step_s: float) -> None:
        """Begin to emit what the last steps brought, with a claim if requests wait; nothing where it can wait for the
        next step, which takes `step_s`."""
        if self._running.unsent and (self._running.urgent or self._exchange.gathered(step_s)):
            self._exchange.start(self._running.emissions(), self._waiting_claim())

    def deliver(self) -> None:
        """Emit what Redis lacks, and wait for the answer, until it lacks nothing."""
        while self._running.unsent:
            answer = self._exchange.deliver(self._running.emissions(), self._waiting_claim())
            self._settle(answer)

    def _settle(self, answer: EmissionAnswer) -> None:
        """Apply Redis's answer to an emission: its entries, ended requests, and claims."""
        result = answer.result
        for rid in result.taken:
            self._forget(rid)
        self._running.accept(answer.emissions, result)
        self._note_load()
        for rid in self._isolation.emitted(self._running.by_rid, self._exchange.reader.rids):
            self._running.hold(rid)
        for rid in result.cancelled:
            self._end(rid, "cancelled", "cancelled by the client")
        for rid in result.expired:
            self._end(rid, "expired", "the request's deadline passed")
        if answer.claims is not None:
            self._read(answer.claims.requests)
        elif self._exchange.others_wait:
            self._claim_now()
        self._reconcile()
        self._running.note_unsent()

    def _end(self, rid: str, state: Literal["cancelled", "expired"], cause: str) -> None:
        self._emit_ends(self._running.end(rid, state, cause), state)

    def _emit_ends(self, ended: list[RunningRequest], state: RequestState = "finished") -> None:
        """Emit the ends of requests that don't run any more, and count them."""
        for request in ended:
            for emission, accepted_ms in self._exchange.emit_end(request, state):
                self._running.counters.accepted([(request, emission)], accepted_ms)

    def _note_load(self) -> None:
        self._running.note_load()
        self._progress.kv = self._running.kv_tokens

    # --- claims -----------------------------------------------------------------------------------------------------

    def _capacity(self) -> Capacity:
        """Nothing is claimed while adopted logs are read."""
        closed = self._isolation.active or self._signals.draining or bool(self._exchange.reader)
        return self._running.capacity(closed=closed)

    def _waiting_claim(self) -> Call[Claims] | None:
        """The claim that goes with an emission, if requests wait."""
        return self._exchange.claim(self._capacity()) if self._exchange.others_wait else None

    def _claim_now(self) -> Claims:
        claims = self._exchange.claim_now(self._capacity())
        self._read(claims.requests)
        return claims

    def _read(self, claims: Iterable[Claimed]) -> None:
        """Read the requests' parameters and logs, and let them run as they arrive."""
        self._exchange.read([claimed for claimed in claims if not self._has(claimed)])
        self._arrive()

    def _has(self, claimed: Claimed) -> bool:
        """True if this very claim is known: a call's first copy brought it, whose answer was lost. A request that left
        and was claimed again begins anew from its log."""
        if self._running.has(claimed) or self._exchange.reader.has(claimed):
            return True
        self._forget(claimed.rid)
        return False

    def _arrive(self) -> None:
        for request in self._exchange.arrived():
            ended = self._running.add(request)
            self._emit_ends(ended)

    def _resume(self) -> None:
        """Let those run that have been read, or have waited."""
        self._arrive()
        ended = self._running.resume(self._exchange.reader.rids)
        self._emit_ends(ended)

    def _forget(self, rid: str) -> None:
        """The request is not this replica's any more."""
        self._exchange.reader.drop(rid)
        self._running.forget(rid)

    def _reconcile(self) -> None:
        """After an outage of Redis, adopt what it holds to be this replica's, and forget the rest. A server that took
        over may have lost a request's end, and no other process would finish that request."""
        if self._exchange.was_away():
            claims = self._exchange.adopt()
            held_rids = {claimed.rid for claimed in claims}
            for rid in (self._running.by_rid.keys() | self._exchange.reader.rids) - held_rids:
                self._forget(rid)
            self._read(claims)

    def _take_over(self) -> None:
        """Take up what replicas that are gone left behind, room or not: clients wait for it."""
        for replica in self._exchange.gone_replicas():
            inheritance = self._exchange.inherit(replica)
            claims = self._exchange.take_over(replica)
            if claims:
                log.warning(
                    "took over requests", gone=replica, requests=len(claims), suspects=inheritance, action="take_over"
                )
            if inheritance == "waits":
                self._exchange.dead_replicas.look_again(replica)
            if inheritance == "inherited":
                self.deliver()
                claims = self._isolation.inherit(replica, claims)
                self._running.hold_all()
            self._isolation.watch(claims)
            self._read(claims)
            self._resume()

    def _idle(self) -> None:
        """Claim, and if there was nothing wait for the bell, which also rings for cancels, drains and poison."""
        self._note_load()
        self._reconcile()
        claims = self._claim_now()
        if self._running.has_work or claims.more:
            return
        if self._exchange.reader:
            self._exchange.reader.wait(IDLE_BLOCK_MS / 1000)
        elif not self._running.wait_for_grammar(IDLE_BLOCK_MS / 1000):
            self._exchange.wait_for_work(IDLE_BLOCK_MS)
