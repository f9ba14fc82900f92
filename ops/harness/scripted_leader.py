"""A leader without a model, for benchmarks and tests: everything is real but the tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from control import requests
from control.errors import Lost
from control.messages import GenerationRequest, PromptToken, TokenLogprobs
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run, run_every
from control.replicas import health
from control.replicas.lease import Lease, acquire, release, renew
from control.requests import Claimed, Claims, Emission, EmitResult
from control.text.text_stream import Decode
from worker.leader.request import RunningRequest
from worker.scheduling import sequence as choices
from worker.scheduling.sequence import Finisher

PROMPT_TOKENS = 3
"""Tokens of a prompt that are scored in one step, where they are asked for."""
TEND_S = 0.3
"""Between two renewals of the lock."""

Script = Callable[[GenerationRequest], Sequence[int]]
"""The tokens of a request's choices. A choice that has not ended with the last of them starts over."""


def scripted_score(prompt: list[int], position: int, top: int) -> PromptToken:
    """The score of a prompt's token: half as likely as the most likely one, which has the next id."""
    token = prompt[position]
    if position == 0:
        return PromptToken(token)
    likely = [(token ^ 1, -position / 8), (token, -position / 8 - 1)]
    return PromptToken(token, -position / 8 - 1, 2, likely[:top])


class ScriptedLeader:
    """The leader of one replica. Each `turn` is a step."""

    def __init__(
        self, client: SyncRedis, model: str, replica: str, decode: Decode, script: Script, room: int = 1000
    ) -> None:
        self.client = client
        self.model = model
        self.replica = replica
        self.script = script
        self.room = room
        self.running: dict[str, RunningRequest] = {}
        self.fail_at: int | None = None
        """Entries after which every request ends with an error."""
        self.cached = 0
        """Cached tokens of each prompt, as the first entry of its log says."""
        self._finisher = Finisher(decode)
        self._tokens: dict[str, Sequence[int]] = {}
        self._lease: Lease | None = None
        self._tended = 0.0
        self._adopting = False
        self._after = ""

    @property
    def lease(self) -> Lease:
        """Taken if this leader has none. Raises Lost if another one holds the lock."""
        if self._lease is None:
            self._lease = run(self.client, acquire(self.model, self.replica, "scripted", 1, weights="scripted"))
            if self._lease is None:
                raise Lost(f"another leader holds replica {self.replica}")
            self._tended = 0.0
            self._adopting = True
            self._after = ""
        return self._lease

    def leave(self) -> None:
        """Release the lock."""
        if self._lease is not None:
            run(self.client, release(self._lease))
            self._lease = None

    def drop(self) -> None:
        """Forget lock and requests, as at the end of an epoch."""
        self._lease = None
        self.running.clear()

    def tend(self) -> None:
        """Renew the lock and send a heartbeat when they are due."""
        run_every(self.client, self._tending())

    def turn(self, *, speaks: bool = True, claims: bool = True) -> int:
        """Produce a token of each choice, then emit and claim in one round trip. Returns the entries emitted."""
        lease = self.lease
        if claims:
            self._adopt()
        if speaks:
            for request in self.running.values():
                self.speak(request)
        offered = {rid: request.emission() for rid, request in self.running.items()}
        self.before_emit(offered.values())
        calls: list[Call[Any]] = [requests.emit(lease, list(offered.values()))]
        if claims:
            calls.append(requests.claim(lease, self.room - len(self.running), requests.ANY_TOKENS))
        result, *claimed = run_every(self.client, [*calls, *self._tending()])
        self._settle(offered, result)
        if claims:
            self.take(claimed[0])
        return sum(len(emission.entries) for emission in offered.values())

    def take(self, claims: Claims) -> None:
        """Begin the requests of a claim."""
        self._begin(claims.requests)

    def speak(self, request: RunningRequest) -> None:
        """Append the next entry of each choice that has not ended."""
        request.prefilling()
        for sequence in request.live:
            self._speak(request, sequence)

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def before_emit(self, emissions: Collection[Emission]) -> None:
        """Called before each emission."""

    def on_claim(self, claimed: Claimed, request: RunningRequest) -> None:
        """Called with each request that was claimed and read."""

    # --- parts of a turn --------------------------------------------------------------------------------------------

    def _tending(self) -> list[Call[Any]]:
        lease = self.lease
        now = time.monotonic()
        if now - self._tended < TEND_S:
            return []
        self._tended = now
        beat = health.Beat(
            epoch=lease.epoch,
            seq=0,
            oldest_pending_ms=0,
            device="none",
            memory_bytes=0,
            phase="ready",
            pid=1,
            host="",
        )
        return [renew(lease, 1), health.beat(self.model, self.replica, 0, beat)]

    def _adopt(self) -> None:
        while self._adopting:
            batch = run(self.client, requests.adopt(self.lease, self._after))
            self._begin(batch.requests)
            self._after = batch.after
            self._adopting = batch.more

    def _begin(self, claims: list[Claimed]) -> None:
        all_params = run_every(self.client, [requests.read_params(self.model, claimed.rid) for claimed in claims])
        for claimed, params in zip(claims, all_params, strict=True):
            if params is None:
                continue
            request = RunningRequest.begin(claimed, params)
            for page in requests.read_pages(self.client, self.model, claimed.rid) if claimed.seq else ():
                request.replay(page)
            for sequence in request.live:
                self._finisher.adopt(sequence)
                sequence.cached_prompt_tokens = self.cached
            self.running[claimed.rid], self._tokens[claimed.rid] = request, self.script(params)
            self.on_claim(claimed, request)

    def _speak(self, request: RunningRequest, sequence: choices.Sequence) -> None:
        choice = sequence.choice
        sampling = sequence.sampling
        if self.fail_at is not None and len(request.history) >= self.fail_at:
            request.append(choice, None, "error", "the logits were not finite")
        elif sequence.unscored:
            part = range(sequence.scored, min(sequence.scored + PROMPT_TOKENS, len(sequence.prompt)))
            top = sampling.prompt_logprobs or 0
            request.append_prompt(choice, [scripted_score(sequence.prompt, position, top) for position in part])
            sequence.scored = part.stop
        elif not sampling.max_tokens:
            request.append(choice, None, "length")
        else:
            tokens = self._tokens[request.rid]
            token = tokens[len(sequence.output) % len(tokens)]
            sequence.output.append(token)
            logprobs = None
            if sampling.logprobs is not None:
                logprobs = TokenLogprobs(-0.5, [(token, -0.5), (token ^ 1, -1.5)][: sampling.logprobs])
            finish, cause = self._finisher.decide(sequence, token) or (None, None)
            request.append(choice, token, finish, cause, logprobs)

    def _settle(self, offered: dict[str, Emission], result: EmitResult) -> None:
        for rid in result.taken:
            self._forget(rid)
        for rid, emission in offered.items():
            request = self.running.get(rid)
            if request is None:
                continue
            if rid in result.behind:
                request.send_again(emission, result.behind[rid])
                continue
            request.emitted(emission)
            if emission.done is not None:
                self._forget(rid)
        for rid in result.cancelled:
            self._end(rid, "cancelled", "cancelled by the client")
        for rid in result.expired:
            self._end(rid, "expired", "the request's deadline passed")

    def _end(self, rid: str, state: Any, cause: str) -> None:
        request = self.running.get(rid)
        if request is not None and request.live:
            request.end(state, cause)
            run(self.client, requests.emit(self.lease, [request.emission(state, most=len(request.history))]))
            self._forget(rid)

    def _forget(self, rid: str) -> None:
        self.running.pop(rid, None)
        self._tokens.pop(rid, None)
