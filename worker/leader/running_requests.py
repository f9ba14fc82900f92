"""The requests that a leader runs: which of them are with the scheduler, what a step gave them, and how each ends."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import structlog

from control.errors import RequestError, RequestTooLarge
from control.messages import FinishReason, LogEntry, PromptToken
from control.requests import ANY_TOKENS, Claimed, Emission, EmitResult
from worker.engine.images import EngineImages
from worker.engine.scoring import PromptScores
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.request import RunningRequest, emissions_of, prompt_entries
from worker.rank import series
from worker.rank.counters import Counters
from worker.sampling.grammars import Grammars
from worker.sampling.sampler import StepTokens
from worker.scheduling.scheduler import Scheduler, StepPlan
from worker.scheduling.sequence import Finisher, Flow, Sequence

log = structlog.get_logger()

HOST_FAULT = "the server could not process this request; the server's log has the cause"
CLAIM_AHEAD_STEPS = 2
"""Prompts are claimed for this many steps; the rest stays in the queue."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a leader can take from the queue."""

    requests: int
    tokens: int
    """Tokens of context for which there is KV memory."""
    prefill_tokens: int
    """Prompt tokens that prefill will soon come to."""
    guests: int
    """Requests of other flows for which sequences give way."""
    sated: list[str]
    """Flows ("class tenant") that have their share."""


class RunningRequests:
    """One epoch's running requests, and the only owner of their state. Their sequences are with the scheduler, unless a
    request is held or waits for its grammar.

    It sends nothing to Redis: a method that ends requests returns them, and the caller emits their ends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        finisher: Finisher,
        grammars: Grammars,
        isolation: CrashIsolation,
        images: EngineImages | None = None,
        fingerprint: str | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`images`: those of the leader's rank; None where the model takes text only. `fingerprint`: that of the
        replica's backend, for the logs of its requests. `counters`: the rank's."""
        self.scheduler = scheduler
        self.isolation = isolation
        self.counters = RequestCounters(counters or Counters())
        self._finisher = finisher
        self._grammars = grammars
        self._images = images
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
    def by_rid(self) -> Mapping[str, RunningRequest]:
        return self._requests

    def has(self, claimed: Claimed) -> bool:
        """True if the request runs by this very claim."""
        request = self._requests.get(claimed.rid)
        return request is not None and request.attempts == claimed.attempts

    def capacity(self, *, closed: bool) -> Capacity:
        """What there is room for and prefill will soon come to, and what others give way to; nothing if `closed`."""
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
            if not self._grammars.ready(request.params.sampling.grammar):
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
        self._check_images(request)
        for sequence in request.live:
            self._grammars.constrain(sequence)
            self.scheduler.add(sequence)
            self._finisher.adopt(sequence)

    def _check_images(self, request: RunningRequest) -> None:
        """Raise RequestError for images that this model can't take, or that are not where the prompt has
        placeholders."""
        images = request.params.images
        if not images:
            return
        if self._images is None:
            raise RequestError("The model takes text only, but the request has images. Send it again without them.")
        if why := self._images.unfit(request.params.prompt, images):
            raise RequestError(f"The images do not fit the prompt: {why}. Send the request again.")

    def hold(self, rid: str) -> None:
        """Take a request's sequences from the scheduler while others are on trial; it goes on later from what it has
        produced."""
        request = self._requests[rid]
        self._drop(request)
        self._uncompiled.discard(rid)
        request.restart()

    def hold_all(self) -> None:
        """Where suspects are to be tried: hold whatever runs."""
        if self.isolation.active:
            for rid in [rid for rid, request in self._requests.items() if not request.held]:
                self.hold(rid)

    def prepare_grammars(self) -> None:
        """Make what the first grammar needs, for which other threads stop: while nothing runs."""
        self._grammars.prepare()

    def wait_for_grammar(self, seconds: float) -> bool:
        """Wait for a grammar that is being compiled, `seconds` at most; False at once where there is none."""
        if self._uncompiled:
            self._grammars.wait(seconds)
        return bool(self._uncompiled)

    # --- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step's plan. The first prefill of each request is timed here."""
        plan = self.scheduler.schedule()
        for row in plan.change.rows:
            self._requests[plan.sequences[row.sid].rid].prefilling()
        return plan

    def rids_of(self, plan: StepPlan) -> set[str]:
        return {sequence.rid for sequence in plan.sequences.values()}

    def update(self, plan: StepPlan, tokens: StepTokens, scores: PromptScores) -> None:
        """Give each sequence of the plan the outcome of a forward, and end the choices that end with it. It is emitted
        only after all ranks have acknowledged the step; if the step fails, it is forgotten with the epoch."""
        sequences = plan.sequences
        failed = scores.failed
        rows = plan.logits_rows
        sampled = {
            sid: [token for token in tokens.ids[its.start : its.stop] if token >= 0]  # none where the first row failed
            for sid, its in rows.items()
            if sid not in failed
        }
        self.scheduler.update(
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
        if self._requests[sequence.rid].sequences[sequence.choice] is sequence:
            self._end_choice(sequence, "error", HOST_FAULT)

    def _sampled(self, sequence: Sequence, chosen: list[int], tokens: StepTokens, index: int) -> None:
        """Note tokens that were sampled one after the other, in the rows from `index` on. Its choice may end with any
        of them; the later ones are dropped then."""
        if (vector := tokens.vectors.get(index)) is not None:
            self._end_choice(sequence, "stop", vector=vector)
            return
        if not sequence.sampling.max_tokens:
            self._end_choice(sequence, "length")  # only its prompt was asked for
            return
        for place, token in enumerate(chosen):
            if place:
                sequence.output.append(token)
            end = self._finisher.decide(sequence, token)
            finish, cause = end if end is not None else (None, None)
            self.urgent |= end is not None or len(sequence.output) == 1
            logprobs = tokens.logprobs.get(index + place)
            self._requests[sequence.rid].append(sequence.choice, token, finish, cause, logprobs)
            if end is not None:
                self.scheduler.drop(sequence.sid)
                return

    def _scored(self, sequence: Sequence, scored: list[PromptToken]) -> None:
        """Note the next tokens of a prompt, before any that is sampled after them."""
        entries = prompt_entries(sequence, scored)
        sequence.scored += len(entries)
        self._requests[sequence.rid].append_prompt(sequence.choice, entries)

    def _end_choice(
        self, sequence: Sequence, finish: FinishReason, cause: str | None = None, vector: bytes | None = None
    ) -> None:
        """End a choice without a token, and no other."""
        self.urgent = True
        self._requests[sequence.rid].append(sequence.choice, None, finish, cause, vector=vector)
        self.scheduler.drop(sequence.sid)

    # --- emissions --------------------------------------------------------------------------------------------------

    def emissions(self) -> list[Emission]:
        """What Redis lacks of each request."""
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


_REASONS = {"stop": 0, "tool_calls": 0, "length": 1, "cancelled": 2, "expired": 2}
_WITHOUT_RESULT = ("cancelled", "expired", "unavailable", "error")
_ERROR = series.REASONS.index("error")


class RequestCounters:
    """Writes the series that vLLM's servers have."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def load(self, running: int, kv_usage: float) -> None:
        """Note how many requests run, and the part of the KV memory that they hold."""
        self._counters.set(series.RUNNING, running)
        self._counters.set(series.KV_USAGE, kv_usage)

    def accepted(self, rows: Iterable[tuple[RunningRequest, Emission]], now_ms: int) -> None:
        """Redis took the emissions at `now_ms` of its clock.

        Neighbours with equally many tokens since the same time are observed together: those are nearly all rows.
        """
        generated = times = each = since_ms = 0
        for request, emission in rows:
            tokens = 0
            for entry in emission.entries:
                if entry.token is not None:
                    tokens += 1
            if emission.seq == 1 and _has_result(emission):
                self._first(request, emission.entries[0], now_ms)
            elif tokens and request.emitted_ms:
                if request.emitted_ms != since_ms or tokens != each:
                    self._between(now_ms - since_ms, each, times)
                    since_ms = request.emitted_ms
                    each = tokens
                    times = 0
                times += 1
            if tokens:
                generated += tokens
                request.tokens += tokens
                request.emitted_ms = now_ms
            if emission.done is not None:
                self._ended(request, emission.entries, now_ms)
        self._between(now_ms - since_ms, each, times)
        if generated:
            self._counters.add(series.GENERATION_TOKENS, generated)

    def _between(self, gap_ms: int, tokens: int, times: int) -> None:
        """`times` emissions had `tokens` tokens, `gap_ms` after the one before."""
        if times:
            self._counters.observe(series.BETWEEN_TOKENS, gap_ms / 1000 / tokens, times * tokens)

    def _first(self, request: RunningRequest, entry: LogEntry, now_ms: int) -> None:
        counters = self._counters
        prompt = len(request.params.prompt)
        request.first_ms = now_ms
        counters.observe(series.TO_FIRST_TOKEN, _seconds(request.enqueued_ms, now_ms))
        counters.add(series.PROMPT_TOKENS, prompt)
        counters.add(series.PREFIX_QUERIES, prompt)
        counters.add(series.PREFIX_HITS, entry.cached or 0)

    def _ended(self, request: RunningRequest, entries: list[LogEntry], now_ms: int) -> None:
        counters = self._counters
        claimed = request.claimed_ms
        first = request.first_ms or now_ms
        finish = next((entry.finish for entry in reversed(entries) if entry.finish is not None), None)
        counters.add(series.SUCCESS, at=_REASONS.get(finish or "", _ERROR))
        counters.observe(series.WHOLE, _seconds(request.enqueued_ms, now_ms))
        counters.observe(series.QUEUED, _seconds(request.enqueued_ms, claimed))
        counters.observe(series.PREFILL, _seconds(claimed, first))
        counters.observe(series.DECODE, _seconds(first, now_ms))
        counters.observe(series.INFERENCE, _seconds(claimed, now_ms))
        counters.observe(series.REQUEST_PROMPT, len(request.params.prompt))
        counters.observe(series.REQUEST_GENERATION, request.tokens)
        if request.tokens > 1:
            counters.observe(series.PER_TOKEN, _seconds(first, now_ms) / (request.tokens - 1))


def _has_result(emission: Emission) -> bool:
    """True if its first entry is part of an answer."""
    return bool(emission.entries) and emission.entries[0].finish not in _WITHOUT_RESULT


def _seconds(since_ms: int, until_ms: int) -> float:
    return max(0, until_ms - since_ms) / 1000
