"""The requests in a leader's hands: how they come in, who of them runs, and how each ends."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from control import requests
from control.connection import Call
from control.errors import Lost, RequestTooLarge
from control.lease import Lease
from control.messages import PromptToken, RequestState, TokenLogprobs
from control.requests import Claims, Emission, EmitResult
from worker.exchange import Exchange
from worker.grammars import Grammars
from worker.isolation import Isolation
from worker.running import RunningRequest
from worker.scheduling.finish import Finisher
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence

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
        self._recounting = False
        """Whether the claim that was asked for last brings all that is this replica's, and not just what is new."""
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
        return bool(self._running)

    # --- coming in --------------------------------------------------------------------------------------------------

    def claim(self) -> Call[Claims]:
        """Ask for what there is room for and prefill will soon come to.

        After an outage also for everything that Redis holds to be this replica's. A server that took over and lagged
        may not know of a request's end, and this process has forgotten the request: nobody else would go on with it.
        """
        self._recounting |= self._exchange.was_away()
        scheduler = self._scheduler
        ahead = AHEAD_STEPS * scheduler.token_budget - scheduler.backlog
        room, tokens = scheduler.room() if not (self.isolation.active or self.draining) else (0, 0)
        if not scheduler.has_work:
            tokens = requests.ANY_TOKENS  # a head that can never fit is then refused instead of blocking its queue
        return requests.claim(self._lease, room, tokens, adopt=self._recounting, ahead_tokens=max(0, ahead))

    def claim_along(self) -> Call[Claims] | None:
        """What to claim together with an offer: nothing where nothing waited at the last one."""
        self._recounting |= self._exchange.was_away()
        return self.claim() if self.waiting or self._recounting else None

    def take(self, claims: Claims) -> None:
        """Let in what a claim brought; after a recount let go of what Redis has ended meanwhile."""
        self.bell = claims.bell
        if self._recounting:
            self._recounting = False
            for rid in self._running.keys() - {claimed.rid for claimed in claims.requests}:
                self._forget(rid)
        for claimed in claims.requests:
            if claimed.rid in self._running:  # claimed by the first copy of a call whose answer was lost
                continue
            request = self._running[claimed.rid] = RunningRequest.from_claim(claimed)
            if not self.isolation.active:
                self._seat(request)

    def watch_adopted(self) -> None:
        """All that is here was adopted: a crash before they have got on makes them suspects."""
        self.isolation.watch(self._running.values())

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
        self._seat_unready()
        if not self.isolation.due(self._running):
            return
        trial = self.isolation.next_trial(self._running)
        for rid in trial or list(self._running):
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
        self._offered = {rid: request.emission() for rid, request in self._running.items()}
        return list(self._offered.values())

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
        for rid in self.isolation.emitted(self._running):
            self._unseat(self._running[rid])
        if self._recounting:  # the claim that came with this has ended them in Redis, and `take` lets them go
            return
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
        for rid in list(self._running):
            self._exchange.try_once(requests.requeue(self._lease, rid))
            del self._running[rid]

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
        while True:
            emission = request.emission(state)
            expected = self._exchange.held(requests.emit(self._lease, [emission])).behind.get(request.rid)
            if expected is None:
                return
            self._send_again(request, emission, expected)

    def _forget(self, rid: str) -> None:
        """The request is not this replica's any more."""
        request = self._running.pop(rid, None)
        for sequence in request.live if request else []:
            self._scheduler.drop(sequence.sid)

    def _unseat(self, request: RunningRequest) -> None:
        """Hold a request while others are on trial; it goes on later from what it has produced."""
        for sequence in request.live:
            self._scheduler.drop(sequence.sid)
        self._unready.discard(request.rid)
        request.restart()
