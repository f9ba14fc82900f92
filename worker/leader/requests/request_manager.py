"""The requests that a leader runs: which of them are with the scheduler, what a step gave them, and how each ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import structlog

from control.errors import RequestError, RequestTooLarge
from control.messages import FinishReason, PromptToken, RequestState
from control.replicas.lease import Lease
from worker.engine.images import EngineImages
from worker.engine.scoring import PromptScores
from worker.leader.requests.crash_isolation import CrashIsolation
from worker.leader.requests.prompt_scores import prompt_entries
from worker.leader.requests.redis_exchange import RedisExchange
from worker.leader.requests.request_counters import RequestCounters
from worker.leader.requests.running import RunningRequest
from worker.metrics.counters import Counters
from worker.sampling.grammars import Grammars
from worker.sampling.step_sampler import StepTokens
from worker.scheduling.finish import Finisher
from worker.scheduling.scheduler import Scheduler, StepPlan
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()

HOST_FAULT = "the server could not process this request; the server's log has the cause"


class RequestManager:
    """One epoch's running requests. Their sequences are with the scheduler, unless a request is held or waits for its
    grammar."""

    def __init__(
        self,
        lease: Lease,
        exchange: RedisExchange,
        scheduler: Scheduler,
        finisher: Finisher,
        grammars: Grammars,
        images: EngineImages | None = None,
        fingerprint: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`images`: those of the leader's rank; None where the model takes text only. `fingerprint`: that of the
        replica's backend, for the logs of its requests. `counters`: the rank's."""
        self.counters = RequestCounters(counters or Counters())
        self._images, self._fingerprint = images, fingerprint
        self._exchange, self._scheduler = exchange, scheduler
        self._finisher, self._grammars = finisher, grammars
        self._running: dict[str, RunningRequest] = {}
        self._uncompiled: set[str] = set()
        """Requests that wait for the compilation of their grammar."""
        self.isolation = CrashIsolation(lease, exchange.held)
        self.urgent = False
        """True if a client waits for what has not been offered to Redis: the first token of a choice, or its end."""

    @property
    def running(self) -> Mapping[str, RunningRequest]:
        return self._running

    # --- beginning and pausing --------------------------------------------------------------------------------------

    def add(self, request: RunningRequest) -> None:
        """Let a request run that has been read, unless others are on trial."""
        request.fingerprint = self._fingerprint
        self._running[request.rid] = request
        self.isolation.arrived(request)
        if self.isolation.may_run(request.rid):
            self._start(request)

    def resume(self, reading: Collection[str]) -> None:
        """Let those run whose grammar has been compiled, and those who were held for a trial that is over. `reading`
        are the requests whose logs are being read: they take part in the isolation of a crash."""
        # No sequence begins with what another has left meanwhile: what crashes must do so by itself.
        self._scheduler.isolating = self.isolation.active or self.isolation.watching
        self._uncompiled &= self._running.keys()
        for rid in list(self._uncompiled):
            self._start(self._running[rid])
        known = self._running.keys() | reading
        if not self.isolation.due(known):
            return
        trial = self.isolation.next_trial(known)
        for rid in [rid for rid in trial or self._running if rid in self._running]:
            if self._running[rid].held:
                self._start(self._running[rid])

    def _start(self, request: RunningRequest) -> None:
        """Hand a request's sequences to the scheduler, from the start or from where they were; not before its grammar
        is compiled."""
        if not self._grammars.ready(request.params.sampling.grammar):
            self._uncompiled.add(request.rid)
            return
        self._uncompiled.discard(request.rid)
        try:
            self._check_images(request)
            for sequence in request.live:
                self._grammars.constrain(sequence)
                self._scheduler.add(sequence)
                self._finisher.adopt(sequence)
        except (RequestTooLarge, RequestError) as error:
            self._refuse(request, str(error))
        except Exception:
            log.exception("could not start a request", rid=request.rid, action="fail_request")
            self._refuse(request, HOST_FAULT)

    def _refuse(self, request: RunningRequest, cause: str) -> None:
        self._drop(request)
        request.end("error", cause)
        self._emit_end(request)
        del self._running[request.rid]

    def _check_images(self, request: RunningRequest) -> None:
        """Raise RequestError for images that this model can't take, or that are not where the prompt has
        placeholders."""
        given = request.params.images
        if not given:
            return
        if self._images is None:
            raise RequestError("The model takes text only, but the request has images. Send it again without them.")
        if why := self._images.unfit(request.params.prompt, given):
            raise RequestError(f"The images do not fit the prompt: {why}. Send the request again.")

    def hold(self, rid: str) -> None:
        """Take a request's sequences from the scheduler while others are on trial; it goes on later from what it has
        produced."""
        request = self._running[rid]
        self._drop(request)
        self._uncompiled.discard(rid)
        request.restart()

    def hold_all(self) -> None:
        """Where suspects are to be tried: hold whatever runs."""
        if self.isolation.active:
            for rid in [rid for rid, request in self._running.items() if not request.held]:
                self.hold(rid)

    def wait_for_grammar(self, seconds: float) -> bool:
        """Wait for a grammar that is being compiled, `seconds` at most; False at once where there is none."""
        if self._uncompiled:
            self._grammars.wait(seconds)
        return bool(self._uncompiled)

    # --- a step -----------------------------------------------------------------------------------------------------

    def before(self, plan: StepPlan) -> None:
        """Note that the plan is about to run: the time of a first prefill, and the requests to blame for a crash."""
        for row in plan.change.rows:
            self._running[plan.sequences[row.sid].rid].prefilling()
        if self.isolation.watching:
            self.isolation.before({sequence.rid for sequence in plan.sequences.values()})

    def apply(self, plan: StepPlan, tokens: StepTokens, scores: PromptScores) -> None:
        """Give each sequence of the plan the outcome of a forward, and end the choices that end with it. It is emitted
        only after all ranks have acknowledged the step; if the step fails, it is forgotten with the epoch."""
        sequences, failed = plan.sequences, scores.failed
        rows = plan.logits_rows
        sampled = {
            sid: [token for token in tokens.ids[its.start : its.stop] if token >= 0]  # none where the first row failed
            for sid, its in rows.items()
            if sid not in failed
        }
        self._scheduler.applied(
            plan,
            {sid: chosen[0] for sid, chosen in sampled.items() if chosen},
            {sid: len(chosen) - 1 for sid, chosen in sampled.items() if chosen},
        )
        for sid, why in failed.items():
            self._end_choice(sequences[sid], "error", why)
        for sid, scored in scores.tokens.items():
            try:
                self._scored(sequences[sid], scored)
            except Exception:
                self._fail(sequences[sid])
        for sid, chosen in sampled.items():
            try:
                if chosen:
                    self._sampled(sequences[sid], chosen, tokens, rows[sid].start)
                else:
                    self._end_choice(sequences[sid], "error", tokens.failures[rows[sid].start])
            except Exception:
                self._fail(sequences[sid])

    def _fail(self, sequence: Sequence) -> None:
        """End a choice whose data raised an exception: neither its neighbours nor the epoch end with it."""
        log.exception("a choice failed", rid=sequence.rid, choice=sequence.choice, action="fail_request")
        if self._running[sequence.rid].sequences[sequence.choice] is sequence:
            self._end_choice(sequence, "error", HOST_FAULT)

    def _sampled(self, sequence: Sequence, chosen: list[int], tokens: StepTokens, index: int) -> None:
        """Note tokens that were sampled one after the other, in the rows from `index` on. Its choice may end with any
        of them; the later ones are dropped then."""
        if (vector := tokens.vectors.get(index)) is not None:
            self._end_choice(sequence, "stop", vector=vector)
            return
        if not sequence.sampling.max_tokens:
            self._end_choice(sequence, "length")  # its prompt has been told, and that was all
            return
        for place, token in enumerate(chosen):
            if place:
                sequence.output.append(token)
            end = self._finisher.decide(sequence, token)
            finish, cause = end if end is not None else (None, None)
            self.urgent |= end is not None or len(sequence.output) == 1
            logprobs = tokens.logprobs.get(index + place)
            self._running[sequence.rid].append(sequence.choice, token, finish, cause, logprobs)
            if end is not None:
                self._scheduler.drop(sequence.sid)
                return

    def _scored(self, sequence: Sequence, scored: list[PromptToken]) -> None:
        """Note the next tokens of a prompt, before any that is sampled after them."""
        entries = prompt_entries(sequence, scored)
        sequence.scored += len(entries)
        self._running[sequence.rid].append_prompt(sequence.choice, entries)

    def _end_choice(
        self, sequence: Sequence, finish: FinishReason, cause: str | None = None, vector: bytes | None = None
    ) -> None:
        """End a choice without a token, and no other."""
        self.urgent = True
        self._running[sequence.rid].append(sequence.choice, None, finish, cause, vector=vector)
        self._scheduler.drop(sequence.sid)

    # --- leaving ----------------------------------------------------------------------------------------------------

    def finished(self, rid: str) -> None:
        """Redis has the request's end."""
        del self._running[rid]

    def end(self, rid: str, state: Literal["cancelled", "expired"], cause: str) -> None:
        """End a running request from outside its own tokens."""
        request = self._running.get(rid)
        if request is None or not request.live:  # it ended by itself meanwhile, and the next offer says so
            return
        del self._running[rid]
        self._drop(request)
        request.end(state, cause)
        self._emit_end(request, state)

    def _emit_end(self, request: RunningRequest, state: RequestState = "finished") -> None:
        """Emit a request's end by itself, and count it."""
        for emission, accepted_ms in self._exchange.emit_end(request, state):
            self.counters.accepted([(request, emission)], accepted_ms)

    def note_load(self) -> None:
        """Count what runs now."""
        self.counters.load(len(self._running), self._scheduler.kv_usage)

    def forget(self, rid: str) -> None:
        """The request is not this replica's any more."""
        if (request := self._running.pop(rid, None)) is not None:
            self._drop(request)

    def _drop(self, request: RunningRequest) -> None:
        for sequence in request.live:
            self._scheduler.drop(sequence.sid)
