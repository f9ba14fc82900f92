"""How tokens leave a leader: offered to Redis while the next step runs, and settled by its answer."""

from __future__ import annotations

import time

from control.redis.connection import Call
from control.requests import Claims, Emission, EmitResult
from worker.leader.requests.claimer import Claimer
from worker.leader.requests.redis_exchange import RedisExchange
from worker.leader.requests.request_manager import RequestManager
from worker.leader.requests.running import RunningRequest, offers

GATHER_S = 0.008
"""Where steps are shorter, Redis gets the tokens of several together; first and last tokens don't wait for others."""


class Emitter:
    """One epoch's offers. There is never more than one under way, and `finish` takes its answer before the next one."""

    def __init__(self, exchange: RedisExchange, manager: RequestManager, claimer: Claimer) -> None:
        self._exchange, self._manager, self._claimer = exchange, manager, claimer
        self._offered: dict[str, Emission] = {}
        self._owes = False
        """True if tokens have not been offered to Redis yet."""
        self._offered_at = 0.0
        self._others_wait = False
        """True if requests that no leader has were waiting when Redis took the last offer."""
        self.gather_s = GATHER_S
        self.exchanges = 0
        """Number of offers that Redis has answered, of steps that every rank has acknowledged."""

    def begin(self) -> None:
        """Offer what the last steps brought, without waiting for the answer; nothing where it can wait for more."""
        if self._owes and (self._manager.urgent or time.monotonic() - self._offered_at >= self.gather_s):
            self._exchange.start(*self._offer())

    def finish(self) -> None:
        """Take the answer to the offer under way. A step has ended since, and Redis is owed its tokens."""
        self._owes = True
        answer = self._exchange.finish()
        if answer is not None:
            self._settle(*answer)

    def deliver(self) -> None:
        """Offer the tokens that are owed and wait for the answer, until none are."""
        while self._owes:
            self._settle(*self._exchange.deliver(*self._offer()))

    def _offer(self) -> tuple[list[Emission], Call[Claims] | None]:
        """The emissions that are due, and a claim if requests wait."""
        self._owes, self._offered_at, self._manager.urgent = False, time.monotonic(), False
        self._offered = offers(self._manager.running.values())
        return list(self._offered.values()), self._claimer.claim() if self._others_wait else None

    def _settle(self, result: EmitResult, claims: Claims | None) -> None:
        """Take Redis's answer to the offer. Raises Lost where the logs are ahead of this leader: they are the truth."""
        self.exchanges += 1
        self._others_wait = result.waiting > 0
        for rid in result.taken:
            self._claimer.forget(rid)
        self._note_accepted(result)
        manager = self._manager
        manager.note_load()
        for rid in manager.isolation.emitted(manager.running, self._claimer.reading.rids):
            manager.hold(rid)
        for rid in result.cancelled:
            manager.end(rid, "cancelled", "cancelled by the client")
        for rid in result.expired:
            manager.end(rid, "expired", "the request's deadline passed")
        if claims is not None:
            self._claimer.take(claims)
        elif self._others_wait:
            self._claimer.claim_now()
        self._claimer.reconcile()
        self._owes |= any(request.owes for request in manager.running.values())

    def _note_accepted(self, result: EmitResult) -> None:
        running = self._manager.running
        taken: list[tuple[RunningRequest, Emission]] = []
        for rid, emission in self._offered.items():
            request = running.get(rid)
            if request is None:
                continue
            if rid in result.behind:
                request.send_again(emission, result.behind[rid])
            else:
                request.emitted(emission)
                taken.append((request, emission))
                if emission.done is not None:
                    self._manager.finished(rid)
        self._manager.counters.accepted(taken, result.accepted_ms)
