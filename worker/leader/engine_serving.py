"""The loop of one epoch of an external engine: submit → hear → log; `RequestLoop` claims and emits."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from control.errors import Poisoned
from control.messages import FinishReason, TokenLogprobs
from control.text.text_stream import Decode
from worker.external.client import LOST_S, EngineClient
from worker.external.engine import ENGINE_LOST, ENGINE_RANK
from worker.leader.engine_sequences import EngineSequences, SequenceNews
from worker.leader.exchange import Exchange
from worker.leader.request_loop import RequestLoop, StopSignals
from worker.leader.running_requests import RunningRequests
from worker.rank.heartbeat import Progress
from worker.sampling.constraints import forced_tokens
from worker.sampling.vectors import NOT_FINITE, result_of
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()

SOON_S = 0.002
HEAR_S = 0.02
"""Shortest and longest wait for the engine before Redis is asked for cancels and new requests: requests often come
together, so that it is asked soon after one has come, and then less and less often."""


@dataclass(frozen=True)
class EngineContext:
    """The objects that the loop of one epoch needs."""

    title: str
    """The engine's name in messages."""
    client: EngineClient
    sequences: EngineSequences
    running: RunningRequests
    exchange: Exchange
    progress: Progress
    check: Callable[[], None]
    signals: StopSignals
    decode: Decode


class EngineServing(RequestLoop):
    """The loop of an engine that is ready."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context.running, context.exchange, context.progress, context.check, context.signals)
        self._title = context.title
        self._client = context.client
        self._sequences = context.sequences
        self._decode = context.decode
        self._asked_at = 0.0
        """The time of the last call to Redis."""
        self._ask_after = HEAR_S

    def _step(self) -> None:
        """Submit what waits, hear the engine, and emit."""
        if self._sequences.unsent:
            if self._isolation.watching:
                self._isolation.before(self._sequences.rids)
            for sequence in self._sequences.submit():
                self._running.by_rid[sequence.rid].prefilling()
            self._ask_after = SOON_S
        for sequence_news in self._sequences.news(self._ask_after):
            self._apply(sequence_news)
        if overdue := self._sequences.overdue_s:
            message = f"{self._title} has {len(self._sequences.rids)} requests and brought no token for {overdue:.1f} s"
            raise Poisoned("deadline", message, ENGINE_RANK)
        is_due = time.monotonic() - self._asked_at > self._ask_after
        if is_due or (self._running.unsent and (self._running.urgent or self._exchange.gathered(self._ask_after))):
            self._running.unsent = True  # a row without entries asks what became of its request
            self.deliver()
            self._running.counters.found_in_cache(self._client.prefix_hits())
            self._asked_at = time.monotonic()
            self._ask_after = min(HEAR_S, 2 * self._ask_after)

    def _apply(self, news: SequenceNews) -> None:
        """Log what came of a sequence, and let it go on or end."""
        if news.broken and not self._client.is_ready(LOST_S):
            message = f"{self._title} does not answer: {news.error or 'its connection ended'}"
            raise Poisoned(ENGINE_LOST, message, ENGINE_RANK)
        sequence = news.sequence
        try:
            self._log(news)
        except Exception:
            self._running.fail(sequence)

    def _log(self, news: SequenceNews) -> None:
        sequence = news.sequence
        if news.vector:
            vector = result_of(np.array(news.vector), sequence.sampling.dimensions)
            if vector is None:
                self._end_choice(sequence, "error", NOT_FINITE)
            else:
                self._running.unsent = True
                self._running.end_choice(sequence, "stop", vector=vector)
            return
        for place, token in enumerate(news.tokens):
            logprobs = news.logprobs[place] if place < len(news.logprobs) else None
            if not self._append(sequence, token, logprobs):
                return
            forced = self._forced(sequence)
            if forced is not None:
                while forced is not None:
                    if not self._append(sequence, forced, None):
                        return
                    forced = self._forced(sequence)
                self._sequences.continued(sequence)
                return
        self._end_or_go_on(news)

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Log a token. True if its choice goes on."""
        sequence.output.append(token)
        self._running.unsent = True
        return self._running.decide(sequence, logprobs)

    def _forced(self, sequence: Sequence) -> int | None:
        """The next token, where the budget of a reasoning forces it."""
        if sequence.sampling.reasoning is None:
            return None
        return forced_tokens([sequence], self._decode).get(0)

    def _end_or_go_on(self, news: SequenceNews) -> None:
        """After the tokens of a piece: fail, end where the engine says that there is nothing more, or go on."""
        sequence = news.sequence
        if news.error:
            self._end_choice(sequence, "error", f"{self._title} could not compute this request: {news.error}")
        elif news.end == "context":
            self._end_choice(sequence, "length")
        elif news.end and news.end != "abort" and sequence.sampling.grammar is not None:
            self._end_choice(sequence, "stop", "grammar")
        elif news.end == "stop":  # by an end of the model's own that its tokenizer's files don't name
            self._end_choice(sequence, "stop", "token")
        elif news.end:
            self._sequences.continued(sequence)

    def _end_choice(self, sequence: Sequence, finish: FinishReason, cause: str | None = None) -> None:
        self._running.unsent = True
        self._running.end_choice(sequence, finish, cause)

    def _prove(self) -> None:
        """The engine answered that it is ready, which is its proof."""

    def _ping(self) -> None:
        if not self._client.is_ready(LOST_S):
            raise Poisoned(ENGINE_LOST, f"{self._title} does not answer", ENGINE_RANK)
