"""How requests come to a leader: claimed, adopted or taken over, and read before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from control import requests
from control.keys import CLASSES
from control.redis.connection import Call
from control.replicas.lease import Lease
from control.requests import Adopted, Claimed, Claims
from worker.leader.requests.reading import Reading, Unreadable
from worker.leader.requests.redis_exchange import RedisExchange
from worker.leader.requests.request_manager import RequestManager
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Flow

CLAIM_AHEAD_STEPS = 2
"""Prompts are claimed for this many steps; the rest stays in the queue."""


class Claimer:
    """One epoch's claims, and the requests whose parameters and logs are on their way here."""

    def __init__(self, lease: Lease, exchange: RedisExchange, scheduler: Scheduler, manager: RequestManager) -> None:
        self._lease, self._exchange, self._scheduler, self._manager = lease, exchange, scheduler, manager
        self.reading = Reading(lease, exchange)
        self.draining = False
        """True if nothing is claimed or taken over, because the replica is to stop."""
        self.bell = "0"
        """The id of the last wake-up that a claim has answered."""
        self._skip = 0

    def claim(self) -> Call[Claims]:
        """Ask for what there is room for and prefill will soon come to, and for what others give way to; for nothing
        while adopted logs are read."""
        scheduler, room, tokens = self._scheduler, 0, 0
        guests, flows = 0, list[Flow]()
        ahead = CLAIM_AHEAD_STEPS * scheduler.token_budget - scheduler.backlog
        if not (self._manager.isolation.active or self.draining or self.reading):
            room, tokens = scheduler.room()
            guests, flows = scheduler.guests(idle=room if ahead <= 0 and tokens else 0)
        if not scheduler.has_work:
            tokens = requests.ANY_TOKENS  # a head that can never fit is then refused instead of blocking its queue
        sated = [f"{flow.priority} {flow.tenant}" for flow in flows]
        return requests.claim(self._lease, room, tokens, max(0, ahead), self._skip, guests, sated)

    def claim_now(self) -> Claims:
        """Claim in a round trip of its own, and begin to read what came."""
        claims = self._exchange.held(self.claim())
        self.take(claims)
        return claims

    def take(self, claims: Claims) -> None:
        self.bell, self._skip = claims.bell, claims.skip
        self.read(claims.requests)

    def read(self, claims: Iterable[Claimed]) -> None:
        """Read the requests' parameters and logs, and let them run as they arrive."""
        self.reading.add([claimed for claimed in claims if not self._has(claimed)])
        self.arrive()

    def arrive(self) -> None:
        for request in self.reading.take():
            if isinstance(request, Unreadable):
                self._exchange.held(requests.bury(self._lease, request.rid, request.cause))
            else:
                self._manager.add(request)

    def _has(self, claimed: Claimed) -> bool:
        """True if this very claim is known: a call's first copy brought it, whose answer was lost. A request that left
        and was claimed again begins anew from its log."""
        known = self._manager.running.get(claimed.rid)
        if (known is not None and known.attempts == claimed.attempts) or self.reading.has(claimed):
            return True
        self.forget(claimed.rid)
        return False

    # --- what earlier epochs and other replicas left -----------------------------------------------------------------

    def adopt(self) -> list[Claimed]:
        """All that Redis holds to be this replica's, in the order in which it was claimed first."""
        return self._in_batches(lambda after: requests.adopt(self._lease, after))

    def take_over(self, gone: str) -> list[Claimed]:
        """All that another replica left behind that is gone."""
        return self._in_batches(lambda after: requests.takeover(self._lease, gone, after))

    def _in_batches(self, call: Callable[[str], Call[Adopted]]) -> list[Claimed]:
        found, after, more = list[Claimed](), "", True
        while more:
            batch = self._exchange.held(call(after))
            found += batch.requests
            self.bell, after, more = batch.bell, batch.after, batch.more
        return sorted(found, key=lambda one: (CLASSES.index(one.priority), one.claimed_ms, one.rid))

    def reconcile(self) -> None:
        """After an outage of Redis, adopt what it holds to be this replica's, and forget the rest. A server that took
        over may have lost a request's end, and no other process would finish that request."""
        if self._exchange.was_away():
            claims = self.adopt()
            for rid in (self._manager.running.keys() | self.reading.rids) - {claimed.rid for claimed in claims}:
                self.forget(rid)
            self.read(claims)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def forget(self, rid: str) -> None:
        """The request is not this replica's any more."""
        self.reading.drop(rid)
        self._manager.forget(rid)

    def give_back(self) -> None:
        """Put every request back into its queue at once; another epoch continues it from its log."""
        for rid in [*self._manager.running, *self.reading.rids]:
            self._exchange.try_once(requests.requeue(self._lease, rid))
            self.forget(rid)
