"""The requests that a leader runs: which of their sequences are being computed, and how each ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import structlog

from control.errors import RequestError, RequestTooLarge
from control.messages import FinishReason, TokenLogprobs
from control.requests import ANY_TOKENS, Claimed, Emission, EmitResult
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.request import RunningRequest, emissions_of
from worker.leader.request_counters import RequestCounters
from worker.rank.counters import Counters
from worker.sampling.grammars import Grammars
from worker.scheduling.sequence import Finisher, Flow, Sequence

log = structlog.get_logger()

HOST_FAULT = "the server could not process this request; the server's log has the cause"
CLAIM_AHEAD_STEPS = 2
"""Prompts are claimed for this many steps; the rest stays in the queue."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The room that a leader has for requests of the queue."""

    requests: int
    tokens: int
    """Tokens of context for which there is KV memory."""
    prefill_tokens: int
    """Prompt tokens that prefill will soon come to."""
    guests: int
    """Requests of other flows for which sequences give way."""
    sated: list[str]
    """Flows ("class tenant") that have their share."""


class SequenceOwner(Protocol):
    """The owner of the running requests' sequences: the scheduler of a group, or an external engine."""

    token_budget: int
    """Prompt tokens of a step."""

    @property
    def isolating(self) -> bool:
        """True if no sequence may begin with another's KV just now."""
        ...

    @isolating.setter
    def isolating(self, isolating: bool) -> None: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def backlog(self) -> int:
        """Prompt tokens that wait."""
        ...

    @property
    def kv_usage(self) -> float:
        """The part of the KV memory that running sequences hold, 0 to 1."""
        ...

    def kv_tokens(self) -> tuple[int, int]:
        """Tokens of KV memory in use and kept."""
        ...

    def room(self) -> tuple[int, int]:
        """The number of sequences, and of tokens of context, that could start now."""
        ...

    def guests(self, idle: int = 0) -> tuple[int, list[Flow]]:
        """The number of sequences of other flows for which running ones would be preempted, and the flows that have
        their share."""
        ...

    def add(self, sequence: Sequence) -> int:
        """Take a new or a continued sequence and return its sid. Raises RequestTooLarge if it can never fit."""
        ...

    def drop(self, sid: int, *, failed: bool = False) -> None:
        """Forget a sequence."""
        ...


class RunningRequests:
    """One epoch's running requests, and the only owner of their state. Their sequences are with the scheduler, unless a
    request is held or waits for its grammar.

    It sends nothing to Redis: a method that ends requests returns them, and the caller emits their ends.
    """

    def __init__(
        self,
        scheduler: SequenceOwner,
        finisher: Finisher,
        grammars: Grammars | None,
        isolation: CrashIsolation,
        fingerprint: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`grammars`: None where what computes the sequences keeps to them by itself. `fingerprint`: that of the
        replica's backend, for the logs of its requests. `counters`: the rank's."""
        self.scheduler = scheduler
        self.isolation = isolation
        self.counters = RequestCounters(counters or Counters())
        self._finisher = finisher
        self._grammars = grammars
        self._fingerprint = fingerprint
        self._requests: dict[str, RunningRequest] = {}
        self._uncompiled: set[str] = set()
        """Requests that wait for the compilation of their grammar."""
        self.urgent = False
        """True if a client waits for what has not been emitted: the first token of a choice, or its end."""
        self.unsent = False
        """True if steps that every rank has acknowledged brought tokens that have not been emitted."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens of KV memory in use and kept."""
        return self.scheduler.kv_tokens()

    @property
    def by_rid(self) -> Mapping[str, RunningRequest]:
        return self._requests

    def has(self, claimed: Claimed) -> bool:
        """True if the request runs by this very claim."""
        request = self._requests.get(claimed.rid)
        return request is not None and request.attempts == claimed.attempts

    def capacity(self, *, closed: bool) -> Capacity:
        """The room for requests whose prefill begins soon, and for those for which others are preempted; none if
        `closed`."""
        scheduler = self.scheduler
        ahead = CLAIM_AHEAD_STEPS * scheduler.token_budget - scheduler.backlog
        requests = tokens = guests = 0
        flows: list[Flow] = []
        if not closed:
            requests, tokens = scheduler.room()
            guests, flows = scheduler.guests(idle=requests if ahead <= 0 and tokens else 0)
        if not scheduler.has_work:
            tokens = ANY_TOKENS  # a head that can never fit is then refused instead of blocking its queue
        return Capacity(requests, tokens, max(0, ahead), guests, [f"{flow.priority} {flow.tenant}" for flow in flows])

    # --- beginning and pausing --------------------------------------------------------------------------------------

    def add(self, request: RunningRequest) -> list[RunningRequest]:
        """Let a request run that has been read, unless others are on trial. Returns it if it can't run and has
        ended."""
        request.fingerprint = self._fingerprint
        self._requests[request.rid] = request
        self.isolation.arrived(request)
        return self._start([request]) if self.isolation.may_run(request.rid) else []

    def resume(self, reading: Collection[str]) -> list[RunningRequest]:
        """Let those run whose grammar has been compiled, and those that were held for a trial that is over. `reading`
        are the requests whose logs are being read: they take part in the isolation of a crash. Returns those that can't
        run and have ended."""
        # No sequence begins with what another has left meanwhile: what crashes must do so by itself.
        self.scheduler.isolating = self.isolation.active or self.isolation.watching
        self._uncompiled &= self._requests.keys()
        ended = self._start([self._requests[rid] for rid in self._uncompiled])
        rids = self._requests.keys() | reading
        if not self.isolation.due(rids):
            return ended
        trial = self.isolation.next_trial(rids) or self._requests
        on_trial = [self._requests[rid] for rid in trial if rid in self._requests]
        return ended + self._start([request for request in on_trial if request.held])

    def _start(self, requests: list[RunningRequest]) -> list[RunningRequest]:
        """Hand the requests' sequences to the scheduler, from the start or from where they were; not before their
        grammars are compiled. Returns those that can't run and have ended."""
        ended: list[RunningRequest] = []
        for request in requests:
            if self._grammars is not None and not self._grammars.ready(request.params.sampling.grammar):
                self._uncompiled.add(request.rid)
                continue
            self._uncompiled.discard(request.rid)
            try:
                self._add_sequences(request)
            except (RequestTooLarge, RequestError) as error:
                self._end(request, "error", str(error))
                ended.append(request)
            except Exception:
                log.exception("could not start a request", rid=request.rid, action="fail_request")
                self._end(request, "error", HOST_FAULT)
                ended.append(request)
        return ended

    def _add_sequences(self, request: RunningRequest) -> None:
        for sequence in request.live:
            if self._grammars is not None:
                self._grammars.constrain(sequence)
            self.scheduler.add(sequence)
            self._finisher.adopt(sequence)

    def hold(self, rid: str) -> None:
        """Take a request's sequences from the scheduler while others are on trial; it continues later from its
        tokens."""
        request = self._requests[rid]
        self._drop(request)
        self._uncompiled.discard(rid)
        request.restart()

    def hold_all(self) -> None:
        """Hold all running sequences, so that suspects run alone."""
        if self.isolation.active:
            for rid in [rid for rid, request in self._requests.items() if not request.held]:
                self.hold(rid)

    def prepare_grammars(self) -> None:
        """Make what the first grammar needs, for which other threads stop: while nothing runs."""
        if self._grammars is not None:
            self._grammars.prepare()

    def wait_for_grammar(self, seconds: float) -> bool:
        """Wait for a grammar that is being compiled, `seconds` at most; False at once where there is none."""
        if self._uncompiled and self._grammars is not None:
            self._grammars.wait(seconds)
        return bool(self._uncompiled)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def decide(self, sequence: Sequence, logprobs: TokenLogprobs | None = None) -> bool:
        """Note the last token of a sequence's output. True if its choice goes on; else it has ended."""
        token = sequence.output[-1]
        end = self._finisher.decide(sequence, token)
        finish, cause = end if end is not None else (None, None)
        self.urgent |= end is not None or len(sequence.output) == 1
        self._requests[sequence.rid].append(sequence.choice, token, finish, cause, logprobs)
        if end is not None:
            self.scheduler.drop(sequence.sid)
        return end is None

    def fail(self, sequence: Sequence) -> None:
        """End a choice whose data raised an exception: neither its neighbours nor the epoch end with it."""
        log.exception("a choice failed", rid=sequence.rid, choice=sequence.choice, action="fail_request")
        if self._requests[sequence.rid].sequences[sequence.choice] is sequence:
            self.end_choice(sequence, "error", HOST_FAULT)

    def end_choice(
        self, sequence: Sequence, finish: FinishReason, cause: str | None = None, vector: bytes | None = None
    ) -> None:
        """End a choice without a token, and no other."""
        self.urgent = True
        self._requests[sequence.rid].append(sequence.choice, None, finish, cause, vector=vector)
        self.scheduler.drop(sequence.sid)

    # --- emissions --------------------------------------------------------------------------------------------------

    def emissions(self) -> list[Emission]:
        """The entries of each request that Redis lacks."""
        self.unsent = False
        self.urgent = False
        return emissions_of(self._requests.values())

    def accept(self, emissions: list[Emission], result: EmitResult) -> None:
        """Take Redis's answer to emissions. Raises Lost where the logs are ahead of this leader: they are the truth."""
        accepted: list[tuple[RunningRequest, Emission]] = []
        for emission in emissions:
            request = self._requests.get(emission.rid)
            if request is None:
                continue
            if emission.rid in result.behind:
                request.send_again(emission, result.behind[emission.rid])
                continue
            request.emitted(emission)
            accepted.append((request, emission))
            if emission.done is not None:
                del self._requests[emission.rid]
        self.counters.accepted(accepted, result.accepted_ms)

    def note_unsent(self) -> None:
        """See whether Redis lacks anything still."""
        self.unsent = self.unsent or any(request.owes for request in self._requests.values())

    def note_load(self) -> None:
        """Count what runs now."""
        self.counters.load(len(self._requests), self.scheduler.kv_usage)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def end(self, rid: str, state: Literal["cancelled", "expired"], cause: str) -> list[RunningRequest]:
        """End a running request from outside its own tokens. Returns it, or nothing where it ended by itself
        meanwhile: its next emission says so."""
        request = self._requests.get(rid)
        if request is None or not request.live:
            return []
        self._end(request, state, cause)
        return [request]

    def _end(self, request: RunningRequest, finish: FinishReason, cause: str) -> None:
        self._drop(request)
        request.end(finish, cause)
        del self._requests[request.rid]

    def forget(self, rid: str) -> None:
        """The request is not this replica's any more."""
        request = self._requests.pop(rid, None)
        if request is not None:
            self._drop(request)

    def _drop(self, request: RunningRequest) -> None:
        for sequence in request.live:
            self.scheduler.drop(sequence.sid)
