"""The requests in a leader's hands: how they come in, who of them runs, and how each ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from control import requests
from control.errors import Lost, RequestTooLarge
from control.keys import CLASSES
from control.messages import PromptToken, RequestState, TokenLogprobs
from control.redis.connection import Call
from control.replicas.lease import Lease
from control.requests import Adopted, Claimed, Claims, Emission, EmitResult
from worker.leader.exchange import Exchange
from worker.leader.isolation import Isolation
from worker.leader.reading import Reading
from worker.leader.running import RunningRequest, offers
from worker.sampling.grammars import Grammars
from worker.scheduling.finish import Finisher
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Flow, Sequence

log = structlog.get_logger()

AHEAD_STEPS = 2
"""Prompts are claimed for this many steps ahead; the rest stays in the queue."""


class Roster:
    """One epoch's requests, from claim to last emission. Those that run are with the scheduler too."""

    def __init__(
        self, lease: Lease, exchange: Exchange, scheduler: Scheduler, finisher: Finisher, grammars: Grammars
    ) -> None:
        self._lease, self._exchange = lease, exchange
        self._scheduler, self._finisher, self._grammars = scheduler, finisher, grammars
        self._unready: set[str] = set()
        """Those that may run as soon as their grammar is compiled."""
        self._running: dict[str, RunningRequest] = {}
        self._offered: dict[str, Emission] = {}
        self.reading = Reading(lease, exchange)
        """Those whose parameters and logs are on their way here."""
        self._skip = 0
        self.isolation = Isolation(lease, exchange.held)
        self.draining = False
        """Whether nothing new is claimed, nor taken over, because the replica is to go."""
        self.urgent = False
        """Whether a client waits for what has not been offered: the first token of a choice, or its end."""
        self.waiting = False
        """Whether requests that no leader has were waiting when Redis took the last offer."""
        self.bell = "0"
        """The id of the last ring of the bell that a claim has answered."""

    @property
    def busy(self) -> bool:
        return bool(self._running or self.reading)

    # --- coming in --------------------------------------------------------------------------------------------------

    def claim(self) -> Call[Claims]:
        """Ask for what there is room for and prefill will soon come to, and for what others give way to; for nothing
        while adopted logs are read."""
        scheduler, room, tokens = self._scheduler, 0, 0
        guests, flows = 0, list[Flow]()
        ahead = AHEAD_STEPS * scheduler.token_budget - scheduler.backlog
        if not (self.isolation.active or self.draining or self.reading):
            room, tokens = scheduler.room()
            guests, flows = scheduler.guests(idle=room if ahead <= 0 and tokens else 0)
        if not scheduler.has_work:
            tokens = requests.ANY_TOKENS  # a head that can never fit is then refused instead of blocking its queue
        sated = [f"{flow.priority} {flow.tenant}" for flow in flows]
        return requests.claim(self._lease, room, tokens, max(0, ahead), self._skip, guests, sated)

    def claim_along(self) -> Call[Claims] | None:
        """What to claim together with an offer: nothing where nothing waited at the last one."""
        return self.claim() if self.waiting else None

    def take(self, claims: Claims) -> None:
        """Let in what a claim brought."""
        self.bell, self._skip = claims.bell, claims.skip
        self.let_in(claims.requests)

    def let_in(self, claims: Iterable[Claimed]) -> None:
        """Read the requests' parameters and logs, and let them run as they arrive."""
        self.reading.add([claimed for claimed in claims if not self._has(claimed)])
        self._let_in_read()

    def _has(self, claimed: Claimed) -> bool:
        """Whether this very claim is known: a call's first copy brought it, whose answer was lost. A request that left
        and was claimed again begins anew from its log."""
        known = self._running.get(claimed.rid)
        if (known is not None and known.attempts == claimed.attempts) or self.reading.has(claimed):
            return True
        self._forget(claimed.rid)
        return False

    def _let_in_read(self) -> None:
        for request in self.reading.take():
            self._running[request.rid] = request
            self.isolation.arrived(request)
            if self.isolation.may_run(request.rid):
                self._seat(request)

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

    def recount(self) -> None:
        """After an outage compare with Redis: take up what it holds to be this replica's, let go of the rest.

        A server that took over and lagged may not know of a request's end, and this process has forgotten the
        request: nobody else would go on with it.
        """
        if self._exchange.was_away():
            claims = self.adopt()
            for rid in (self._running.keys() | self.reading.rids) - {claimed.rid for claimed in claims}:
                self._forget(rid)
            self.let_in(claims)

    def hold_all(self) -> None:
        """Where suspects are to be tried: hold whatever runs."""
        if self.isolation.active:
            for request in self._running.values():
                if not request.held:
                    self._unseat(request)

    def _seat(self, request: RunningRequest) -> None:
        """Let a request run, from the start or from where it was; not before its grammar is compiled."""
        if not self._grammars.ready(request.params.sampling.grammar):
            self._unready.add(request.rid)
            return
        self._unready.discard(request.rid)
        try:
            for sequence in request.live:
                self._grammars.constrain(sequence)
                self._scheduler.add(sequence)
                self._finisher.adopt(sequence)
        except RequestTooLarge as error:
            for sequence in request.live:
                self._scheduler.drop(sequence.sid)
            request.end("error", str(error))
            self._tell(request)
            del self._running[request.rid]

    # --- running ----------------------------------------------------------------------------------------------------

    def convene(self) -> None:
        """Where a trial is over, let the next ones run alone that may have crashed the group; everybody once nobody is
        suspected. Meanwhile nobody begins with what another has left: what crashes must do so by itself."""
        self._scheduler.isolating = self.isolation.active or self.isolation.watching
        self._let_in_read()
        self._seat_unready()
        known = self._running.keys() | self.reading.rids
        if not self.isolation.due(known):
            return
        trial = self.isolation.next_trial(known)
        for rid in [rid for rid in trial or self._running if rid in self._running]:
            if self._running[rid].held:
                self._seat(self._running[rid])

    def _seat_unready(self) -> None:
        """Let those run whose grammar has been compiled meanwhile."""
        self._unready &= self._running.keys()
        for rid in list(self._unready):
            self._seat(self._running[rid])

    def wait_for_grammar(self, seconds: float) -> bool:
        """Wait for a grammar that is being compiled, `seconds` at most; False at once where there is none."""
        if self._unready:
            self._grammars.wait(seconds)
        return bool(self._unready)

    def rids(self, sids: Iterable[int]) -> dict[int, str]:
        """The request of each of these sequences, "" for the group's proof of itself."""
        return {sid: self._scheduler.sequence(sid).rid for sid in sids}

    def prefilling(self, sids: list[int]) -> None:
        """Tokens of these sequences are about to be fed."""
        for sid in sids:
            self._running[self._scheduler.sequence(sid).rid].prefilling()

    def sampled(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Note a sampled token, and decide whether its choice ends with it."""
        if not sequence.sampling.max_tokens:
            self._nothing_wanted(sequence)
            return
        end = self._finisher.decide(sequence, token)
        self.urgent |= end is not None or len(sequence.output) == 1
        finish, cause = end if end is not None else (None, None)
        self._running[sequence.rid].append(sequence.choice, token, finish, cause, logprobs)
        if end is not None:
            self._scheduler.drop(sequence.sid)

    def _nothing_wanted(self, sequence: Sequence) -> None:
        """Its prompt has been told, and that was all."""
        self.urgent = True
        self._running[sequence.rid].append(sequence.choice, None, "length")
        self._scheduler.drop(sequence.sid)

    def scored(self, sequence: Sequence, tokens: list[PromptToken]) -> None:
        """Note the next tokens of a prompt, before any that is sampled after them."""
        sequence.scored += len(tokens)
        self._running[sequence.rid].append_prompt(sequence.choice, tokens)

    def failed(self, sequence: Sequence, why: str) -> None:
        """A row without a token: its choice ends, and no other."""
        self.urgent = True
        self._running[sequence.rid].append(sequence.choice, None, "error", why)
        self._scheduler.drop(sequence.sid)

    # --- going out --------------------------------------------------------------------------------------------------

    def offer(self) -> list[Emission]:
        """What to emit now. `settle` takes the answer, and comes before the next offer."""
        self.urgent = False
        self._offered = offers(self._running.values())
        return list(self._offered.values())

    @property
    def owes(self) -> bool:
        """Whether the last offer was bounded: the next one brings the rest."""
        return any(request.owes for request in self._running.values())

    def settle(self, result: EmitResult) -> None:
        """Take Redis's answer to the offer. Raises Lost where the logs are ahead of this leader: they are the truth."""
        self.waiting = result.waiting > 0
        for rid in result.taken:
            self._forget(rid)
        for rid, emission in self._offered.items():
            request = self._running.get(rid)
            if request is None:
                continue
            if rid in result.behind:
                self._send_again(request, emission, result.behind[rid])
            else:
                request.emitted(emission)
                if emission.done is not None:
                    del self._running[rid]
        for rid in self.isolation.emitted(self._running, self.reading.rids):
            self._unseat(self._running[rid])
        for rid in result.cancelled:
            self._end(rid, "cancelled", "cancelled by the client")
        for rid in result.expired:
            self._end(rid, "expired", "the request's deadline passed")

    def _send_again(self, request: RunningRequest, emission: Emission, expected: int) -> None:
        """A log that has lost its end, as in a failover, gets it from this leader's memory with the next offer."""
        if not request.rewind(emission, expected):
            raise Lost(f"the token log of {request.rid} is elsewhere than this leader: it goes on with seq {expected}")
        log.warning("the token log lost its end; sending it again", rid=request.rid, expected=expected)

    def give_back(self) -> None:
        """Put every running request back into its queue at once; another epoch continues it from its log."""
        for rid in [*self._running, *self.reading.rids]:
            self._exchange.try_once(requests.requeue(self._lease, rid))
            self._running.pop(rid, None)
            self.reading.drop(rid)

    def _end(self, rid: str, state: RequestState, cause: str) -> None:
        """End a running request from outside its own tokens."""
        request = self._running.get(rid)
        if request is None or not request.live:  # it ended by itself meanwhile, and the next offer says so
            return
        del self._running[rid]
        for sequence in request.live:
            self._scheduler.drop(sequence.sid)
        request.end("cancelled" if state == "cancelled" else "expired", cause)
        self._tell(request, state)

    def _tell(self, request: RunningRequest, state: RequestState = "finished") -> None:
        """Emit a request's end by itself, outside a step's offer."""
        done = False
        while not done:
            emission = request.emission(state)
            expected = self._exchange.held(requests.emit(self._lease, [emission])).behind.get(request.rid)
            if expected is not None:
                self._send_again(request, emission, expected)
            else:
                request.emitted(emission)
                done = emission.done is not None

    def _forget(self, rid: str) -> None:
        """The request is not this replica's any more."""
        self.reading.drop(rid)
        request = self._running.pop(rid, None)
        for sequence in request.live if request else []:
            self._scheduler.drop(sequence.sid)

    def _unseat(self, request: RunningRequest) -> None:
        """Hold a request while others are on trial; it goes on later from what it has produced."""
        for sequence in request.live:
            self._scheduler.drop(sequence.sid)
        self._unready.discard(request.rid)
        request.restart()
