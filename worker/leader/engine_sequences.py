"""The sequences that an external engine computes: cut into pieces, submitted, and put together again.

A piece is one request to the engine. Its tokens follow those that are logged, so an engine that died, or a piece that
was cut off, is continued by the next piece.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from control.errors import RequestTooLarge
from control.messages import Sampling, TokenLogprobs
from control.requests import ANY_TOKENS
from worker.external.client import EngineClient, Output
from worker.external.engine import ExternalEngine, Piece, seed_of
from worker.rank.heartbeat import Deadlines
from worker.scheduling.sequence import Flow, Sequence, SequenceState

log = structlog.get_logger()

PIECE_S = 0.15
"""Of a short piece, which brings its tokens together: readers see them so late at most."""
MOST_PIECE = 64
"""Tokens of a short piece."""
WHOLE_FACTOR = 4.0
"""A piece that comes as a whole may take so many times what its tokens took lately."""
UNKNOWN_TOKEN_S = 0.5
TRIES = 3
"""Pieces in a row that bring no token, until their sequence fails."""
NO_LIMIT = 1 << 20


@dataclass(slots=True)
class _Running:
    """A sequence with the piece that is computed, or that waits to be submitted."""

    sequence: Sequence
    started: float = 0.0
    """The time at which its piece was submitted; 0 before."""
    most: int = 0
    """Tokens that its piece has at most."""
    brought: int = 0
    """Tokens of the piece that have come."""
    tries: int = 0
    """Pieces in a row that brought none."""
    held: list[int] = field(default_factory=list[int])
    held_logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    """Of a sequence with a grammar: no engine goes on within one, so nothing of it is news before it is whole."""


@dataclass(slots=True)
class SequenceNews:
    """The new output of a sequence: tokens in order, then perhaps the end that the engine gave, or the cause of its
    failure."""

    sequence: Sequence
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    vector: list[float] = field(default_factory=list[float])
    end: str = ""
    error: str = ""
    broken: bool = False
    """True if the engine failed at it or cut the connection: it may be gone."""


class EngineSequences:
    """The sequences of one epoch. `add` only takes one; `submit` sends what waits; `news` has what came."""

    def __init__(
        self,
        engine: ExternalEngine,
        client: EngineClient,
        most: int,
        context: int,
        eos_ids: list[int] | None = None,
        *,
        embeds: bool = False,
    ) -> None:
        """`most` sequences run at once, each of at most `context` positions. `embeds`: the model gives vectors."""
        self.isolating = False
        self.token_budget = NO_LIMIT
        self._engine = engine
        self._client = client
        self._most = most
        self._context = context
        self._eos_ids = tuple(eos_ids or ())
        self._embeds = embeds
        self._running: dict[int, _Running] = {}
        """By the key of the piece, which is new for each."""
        self._keys: dict[int, int] = {}
        """The key of a sequence's piece, by sid."""
        self._unsent: list[int] = []
        self._last_sid = 0
        self._last_key = 0
        self._token_s = 0.0
        """Seconds a token of a short piece took lately."""
        self._heard_at = 0.0
        """The time at which the engine brought a token last, or got its first piece after it had none."""
        self.deadlines = Deadlines()
        """Learns from the times between tokens."""

    # --- SequenceOwner ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def backlog(self) -> int:
        return 0

    @property
    def kv_usage(self) -> float:
        usage = self._client.stats.kv_usage
        return sum(self.kv_tokens()) / (self._most * self._context) if usage is None else usage

    def kv_tokens(self) -> tuple[int, int]:
        return sum(running.sequence.length for running in self._running.values()), 0

    def room(self) -> tuple[int, int]:
        return max(0, self._most - len(self._running)), ANY_TOKENS

    def guests(self, idle: int = 0) -> tuple[int, list[Flow]]:
        return 0, []

    def add(self, sequence: Sequence) -> int:
        if sequence.longest > self._context:
            raise RequestTooLarge(
                f"The prompt ({len(sequence.prompt)} tokens) and max_tokens ({sequence.sampling.max_tokens}) need "
                f"{sequence.longest} positions, but this model's engine has {self._context}. Shorten the prompt or "
                "lower max_tokens.",
                param="max_tokens",
            )
        sequence.move(SequenceState.WAITING)
        self._last_sid += 1
        sequence.sid = self._last_sid
        self._plan(_Running(sequence))
        return sequence.sid

    def drop(self, sid: int, *, failed: bool = False) -> None:
        key = self._keys.pop(sid, None)
        if key is None:
            return
        running = self._running.pop(key)
        running.sequence.move(SequenceState.ENDED)
        if running.started:
            self._client.cancel(key)
        else:
            self._unsent.remove(key)

    # --- pieces -----------------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> bool:
        """True if a piece waits to be submitted."""
        return bool(self._unsent)

    @property
    def rids(self) -> set[str]:
        """The requests whose sequences are here."""
        return {running.sequence.rid for running in self._running.values()}

    @property
    def _unfed(self) -> int:
        """Tokens of pieces that have brought none: the engine may compute them before anything comes."""
        return sum(
            running.sequence.length for running in self._running.values() if running.started and not running.brought
        )

    @property
    def overdue_s(self) -> float:
        """Seconds for which the engine has brought nothing, where that is longer than it may take; else 0."""
        if not self._running or not self._heard_at:
            return 0.0
        silent = time.monotonic() - self._heard_at
        return silent if silent > self.deadlines.step(self._unfed) + self._whole_s else 0.0

    @property
    def _whole_s(self) -> float:
        """Seconds that the longest piece may take of an engine that brings a piece's tokens together."""
        if self._engine.streams:
            return 0.0
        token_s = WHOLE_FACTOR * self._token_s or UNKNOWN_TOKEN_S
        return token_s * max((running.most for running in self._running.values()), default=0)

    def submit(self) -> list[Sequence]:
        """Send what waits; the sequences of it."""
        sequences: list[Sequence] = []
        if len(self._unsent) == len(self._running):
            self._heard_at = time.monotonic()
        for key in self._unsent:
            running = self._running[key]
            running.started = time.monotonic()
            piece = self._piece(running.sequence)
            running.most = piece.most
            self._client.submit(key, piece)
            sequences.append(running.sequence)
        self._unsent.clear()
        return sequences

    def news(self, seconds: float) -> list[SequenceNews]:
        """The new outputs of running sequences, each once; waits for the first, `seconds` at most."""
        news: dict[int, SequenceNews] = {}
        unfed = self._unfed
        outputs = self._client.outputs(seconds)
        if outputs:
            now = time.monotonic()
            self.deadlines.observe(now - self._heard_at, unfed)
            self._heard_at = now
        for output in outputs:
            running = self._running.get(output.key)
            if running is not None:  # else it was dropped, or goes on with another piece
                sequence_news = news.setdefault(running.sequence.sid, SequenceNews(running.sequence))
                self._take(output, running, sequence_news)
        return list(news.values())

    def continued(self, sequence: Sequence) -> None:
        """The piece of a sequence has ended and the sequence has not: plan the next one. What is under way is let
        go."""
        key = self._keys[sequence.sid]
        running = self._running.pop(key)
        if key in self._unsent:
            self._unsent.remove(key)
        else:
            self._client.cancel(key)
        self._plan(running)

    def _plan(self, running: _Running) -> None:
        self._last_key += 1
        running.started = 0.0
        running.brought = 0
        self._running[self._last_key] = running
        self._keys[running.sequence.sid] = self._last_key
        self._unsent.append(self._last_key)

    def _take(self, output: Output, running: _Running, news: SequenceNews) -> None:
        part = output.part
        running.brought += len(part.tokens)
        if part.tokens:
            running.tries = 0
        if part.cached and not running.sequence.output:
            running.sequence.cached_prompt_tokens = min(part.cached, len(running.sequence.prompt))
        if not self._engine.streams and running.brought:
            self._token_s = (time.monotonic() - running.started) / running.brought
        brings = bool(running.brought or part.vector)
        failed = bool(output.failure) or part.end == "abort" or (bool(part.end) and not brings)
        if running.sequence.sampling.grammar is None:
            news.tokens += part.tokens
            news.logprobs += part.logprobs
        elif failed:
            running.held.clear()
            running.held_logprobs.clear()
        else:
            running.held += part.tokens
            running.held_logprobs += part.logprobs
            if part.end:
                news.tokens += running.held
                news.logprobs += running.held_logprobs
        news.end = part.end
        news.vector = part.vector
        if not failed:
            return
        running.tries += 1
        log.warning(
            "a piece failed", rid=running.sequence.rid, failure=output.failure, error=part.error, action="engine_piece"
        )
        news.broken = output.failure in ("lost", "failed")
        if output.failure == "refused" or running.tries >= TRIES:
            news.error = part.error or "it aborted the request"
        news.end = news.end or "abort"

    def _piece(self, sequence: Sequence) -> Piece:
        sampling = sequence.sampling
        counts = self._engine.counts_alone and not sequence.output
        penalised = not counts and bool(sampling.presence_penalty or sampling.frequency_penalty)
        bias = dict(sampling.logit_bias)
        if penalised:
            bias = with_penalties(bias, sampling, Counter(sequence.output))
        return Piece(
            tokens=sequence.prompt + sequence.output,
            sampling=sampling,
            most=self._length(sequence, penalised),
            least=max(0, sampling.min_tokens - len(sequence.output)),
            seed=seed_of(sampling.seed, sequence.choice, len(sequence.output)),
            bias=bias,
            counts=counts,
            salt=sequence.salt,
            eos_ids=self._eos_ids,
            embeds=self._embeds,
        )

    def _length(self, sequence: Sequence, penalised: bool) -> int:
        """Tokens of the next piece. One where Furrow counts for a penalty: the engine would need another bias after
        each token."""
        tokens_left = sequence.most_tokens - len(sequence.output)
        if penalised:
            return 1
        if self._engine.streams or sequence.sampling.grammar is not None:
            return tokens_left
        if not sequence.output or not self._token_s:
            return 1
        return max(1, min(tokens_left, MOST_PIECE, int(PIECE_S / self._token_s)))


def with_penalties(bias: Mapping[int, float], sampling: Sampling, counts: Mapping[int, int]) -> dict[int, float]:
    """The bias of the next token with OpenAI's penalties for tokens that were generated so often."""
    total = dict(bias)
    for token, count in counts.items():
        total[token] = total.get(token, 0.0) - sampling.presence_penalty - sampling.frequency_penalty * count
    return total
