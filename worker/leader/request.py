"""Requests in the hands of a leader: what was claimed, what its choices produced, what is to be emitted next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from control.clock import now_ms
from control.errors import Lost
from control.messages import FinishReason, GenerationRequest, LogEntry, PromptToken, RequestState, TokenLogprobs
from control.requests import Claimed, Emission
from control.requests.token_log import TokenLog
from worker.engine.scoring import ScoreTarget
from worker.scheduling.lookup import Accepted, Prediction
from worker.scheduling.sequence import Flow, Sequence, SequenceState, StepPlan

log = structlog.get_logger()

PROMPT_TOKENS_AN_ENTRY = 64
"""Limit of scored prompt tokens in one entry, which is handed on whole."""
EMIT_ENTRIES = 256
"""Limit of one request's entries in one emission: a leader may have to send a whole log again."""
OFFER_ENTRIES = 2_048
"""Limit of all entries in one exchange: after a loss of data a leader may have to send many logs again."""


@dataclass
class RunningRequest:
    """A claimed request and its choices. The leader owns it from claim to its last emission."""

    rid: str
    params: GenerationRequest
    attempts: int
    """The number of the claim by which it is this leader's: a later one starts from the log again."""
    sequences: list[Sequence | None]
    """The sequence of each choice; None once it has ended."""
    history: TokenLog = field(default_factory=TokenLog)
    """All that it produced, by whichever leader: entry i has seq i + 1. What Redis loses is sent again from here."""
    accepted: int = 0
    """Number of entries that the log in Redis has, as far as is known."""
    times: dict[str, int] = field(default_factory=dict)
    """More fields for the request's hash, in ms since the epoch."""
    prefilled: bool = False
    fingerprint: str | None = None
    """That of this leader's backend."""
    told_fingerprint: str | None = None
    """The last one that the log has."""
    enqueued_ms: int = 0
    """As the next ones, a time of the server's clock."""
    claimed_ms: int = 0
    first_ms: int = 0
    """The time of its first token; 0 before it."""
    emitted_ms: int = 0
    """The time at which Redis took its last token from this leader; 0 before it."""
    tokens: int = 0
    """Number of generated tokens that the log in Redis has."""
    predicted: list[Accepted] = field(default_factory=list[Accepted])
    """The count of predicted tokens that each choice has; empty without a prediction."""

    @classmethod
    def begin(cls, claimed: Claimed, params: GenerationRequest) -> RunningRequest:
        """A claimed request without its log, which `replay` brings: continuing and beginning are the same."""
        predicted = params.sampling.prediction
        prediction = Prediction(params.prompt, predicted) if predicted else None
        sequences: list[Sequence | None] = [
            Sequence(
                rid=claimed.rid,
                choice=choice,
                prompt=params.prompt_of(choice),
                sampling=params.sampling,
                salt=params.cache_salt,
                images=params.images,
                flow=Flow(claimed.tenant, claimed.priority),
                second=params.inputs[choice].second if params.inputs else 0,
                prediction=prediction,
            )
            for choice in range(params.sampling.n)
        ]
        request = cls(claimed.rid, params, claimed.attempts, sequences)
        request.predicted = [Accepted(prediction) for _ in sequences] if prediction is not None else []
        request.enqueued_ms = claimed.enqueued_ms
        request.claimed_ms = claimed.claimed_ms
        request.first_ms = claimed.first_ms
        return request

    def replay(self, entries: list[LogEntry]) -> None:
        self.history.extend(entries)
        self.accepted += len(entries)
        for entry in entries:
            self.told_fingerprint = entry.fingerprint or self.told_fingerprint
            sequence = self.sequences[entry.choice]
            if sequence is None:
                raise RuntimeError(f"request {self.rid}: its log goes on after the end of choice {entry.choice}")
            if entry.token is not None:
                sequence.output.append(entry.token)
                self._follow(sequence)
                self.tokens += 1
            elif entry.prompt:
                sequence.scored += len(entry.prompt)
            if entry.finish is not None:
                self.sequences[entry.choice] = None

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    @property
    def held(self) -> bool:
        """True if it is owned and yet not with the scheduler: it waits while others are on trial."""
        return any(sequence.state is SequenceState.NEW for sequence in self.live)

    def restart(self) -> None:
        """After the scheduler dropped its sequences: be ready to go on from the tokens that there are."""
        for sequence in self.live:
            self.sequences[sequence.choice] = Sequence(
                rid=self.rid,
                choice=sequence.choice,
                prompt=sequence.prompt,
                output=sequence.output,
                sampling=sequence.sampling,
                salt=sequence.salt,
                images=sequence.images,
                flow=sequence.flow,
                scored=sequence.scored,
                second=sequence.second,
                prediction=sequence.prediction,
            )

    def prefilling(self) -> None:
        """Tokens of it are about to be fed; only the first time counts, not a preemption's repeat."""
        if not self.prefilled:
            self.prefilled = True
            self.times["t_prefill"] = now_ms()

    def append(
        self,
        choice: int,
        token: int | None,
        finish: FinishReason | None = None,
        cause: str | None = None,
        logprobs: TokenLogprobs | None = None,
        vector: bytes | None = None,
    ) -> None:
        """Note a token, the end of a choice, or both. Raises RuntimeError for a choice that has ended."""
        seq, cached, fingerprint = self._next(choice)
        count = self._follow(self.sequences[choice])
        predicted = count if finish is not None else None
        entry = LogEntry(seq, choice, token, finish, cause, logprobs, cached, None, vector, fingerprint, predicted)
        self.history.append(entry)
        if finish is not None:
            self.sequences[choice] = None

    def _follow(self, sequence: Sequence | None) -> int | None:
        """Read a choice's new tokens. Returns how many of the prediction it has; None without a prediction."""
        if sequence is None or not self.predicted:
            return None
        self.predicted[sequence.choice].follow(sequence.output)
        return self.predicted[sequence.choice].count

    def append_prompt(self, choice: int, tokens: list[PromptToken]) -> None:
        """Note the next tokens of a choice's prompt. Raises RuntimeError for a choice that has ended."""
        for start in range(0, len(tokens), PROMPT_TOKENS_AN_ENTRY):
            seq, cached, fingerprint = self._next(choice)
            part = tokens[start : start + PROMPT_TOKENS_AN_ENTRY]
            self.history.append(LogEntry(seq, choice, None, cached=cached, prompt=part, fingerprint=fingerprint))

    def _next(self, choice: int) -> tuple[int, int | None, str | None]:
        """Of the next entry: its seq, the number of cached tokens, and the fingerprint where the log has another."""
        sequence = self.sequences[choice]
        if sequence is None:
            raise RuntimeError(f"request {self.rid}: choice {choice} has ended and can't go on")
        seq = len(self.history) + 1
        cached = sequence.cached_prompt_tokens or None if seq == 1 else None
        if cached:
            self.times["cached_tokens"] = cached
        if self.fingerprint == self.told_fingerprint or self.fingerprint is None:
            return seq, cached, None
        self.told_fingerprint = self.fingerprint
        return seq, cached, self.fingerprint

    def end(self, finish: FinishReason, cause: str) -> None:
        """End every choice that still runs, without a token."""
        for sequence in self.live:
            self.append(sequence.choice, None, finish, cause)

    def emission(self, state: RequestState = "finished", most: int = EMIT_ENTRIES) -> Emission:
        """The entries that Redis lacks, `most` at most; with the last of them `state`, if no choice runs any more."""
        lacking = len(self.history) - self.accepted
        whole = lacking <= most
        return Emission(
            rid=self.rid,
            seq=self.accepted + 1,
            entries=self.history.since(self.accepted) if whole else self.history[self.accepted : self.accepted + most],
            done=state if whole and not self.live else None,
            times=dict(self.times),
        )

    @property
    def owes(self) -> bool:
        """True if Redis lacks something that an emission under way does not bring."""
        return len(self.history) > self.accepted

    def emitted(self, emission: Emission) -> None:
        self.accepted += len(emission.entries)
        self.times.clear()

    def send_again(self, emission: Emission, expected: int) -> None:
        """Redis refused the emission, as the log goes on with seq `expected`. A log that has lost its end, as in a
        failover, gets it from this memory with the next offer. Raises Lost for a log that is elsewhere."""
        if expected == emission.seq or expected > len(self.history) + 1:
            raise Lost(f"the token log of {self.rid} is elsewhere than this leader: it goes on with seq {expected}")
        self.accepted = expected - 1
        log.warning("token log lost its end", rid=self.rid, expected=expected, action="send_again")


def emissions_of(requests: Iterable[RunningRequest]) -> list[Emission]:
    """An emission of each, with OFFER_ENTRIES in all at most: a row without entries still asks what became of it."""
    emissions: list[Emission] = []
    remaining = OFFER_ENTRIES
    for request in requests:
        emission = request.emission(most=min(EMIT_ENTRIES, remaining))
        emissions.append(emission)
        remaining -= len(emission.entries)
    return emissions


def score_targets(plan: StepPlan) -> dict[int, ScoreTarget]:
    """By sid, the prompts of the plan that have tokens to score."""
    sequences = [plan.sequences[row.sid] for row in plan.change.rows]
    return {
        sequence.sid: ScoreTarget(sequence.prompt, sequence.sampling.prompt_logprobs or 0)
        for sequence in sequences
        if sequence.unscored
    }


def prompt_entries(sequence: Sequence, scored: list[PromptToken]) -> list[PromptToken]:
    """The next tokens of a prompt's log. The first token of all comes with the second one: nothing comes before it
    that could tell of it."""
    return scored if sequence.scored else [PromptToken(sequence.prompt[0]), *scored]
