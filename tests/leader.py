"""A scripted leader: speaks a given text through the real control scripts, with no model behind it.

It holds the lock, beats, claims, emits and ends requests as a real leader does, so that an API can be tested alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from control import requests
from control.errors import EpochOver, RedisUnavailable
from control.messages import (
    GenerationRequest,
    LogEntry,
    ModelAssets,
    ModelSpec,
    RequestState,
    TokenLogprobs,
)
from control.records import catalog
from control.redis.connection import connect, run, run_all
from control.replicas import health
from control.replicas.lease import Lease, acquire, release, renew
from control.requests import Claimed, Emission
from control.text.text import TextStream
from tests.byte_model import EOS, byte_assets
from tests.script import PROMPT_TOKENS, echo, scripted_score

POLL_S = 0.005


@dataclass
class _Choice:
    tokens: list[int]
    text: TextStream
    at: int = 0
    over: bool = False
    told: int = 0
    """Tokens of the prompt that were told with log probabilities."""


@dataclass
class Held:
    """A claimed request with what was read of it."""

    rid: str
    tenant: str
    priority: str
    params: GenerationRequest
    log: list[LogEntry]


@dataclass
class _Running:
    claimed: Held
    choices: list[_Choice]
    seq: int = 1
    entries: list[LogEntry] = field(default_factory=list)


class ScriptedLeader(threading.Thread):
    """Runs until `stop`. `reply` maps the prompt's text to what every choice says; then comes the end of sequence.

    `pause` freezes the emitting of tokens and `step` lets single ones through; `claiming` switches the claiming off.
    """

    def __init__(self, url: str, model: str = "tiny", assets: ModelAssets | None = None) -> None:
        super().__init__(name=f"leader-{model}", daemon=True)
        self._client = connect(url)
        self.model = model
        self.assets = assets or byte_assets()
        self.tokenizer = Tokenizer.from_str(self.assets.tokenizer_json)
        self.reply: Callable[[str], str] = echo
        self.claiming = True
        self.claimed: list[Held] = []
        self.room = 1000
        self.fail_at: int | None = None
        """Entries after which every request ends with an error, as an injected failure."""
        self.cached: int | None = None
        """What the first entry of every request says."""
        self._running: dict[str, _Running] = {}
        self._allowed = -1  # steps that may still be made; -1: no limit
        self._changed = threading.Condition()
        self._stopping = False
        self._lease: Lease | None = None
        self.publish()

    def publish(self) -> None:
        """Put the model into the catalog; the group counts as formed at once."""
        self._tend()

    def _publish(self) -> None:
        catalog.put_spec(self._client, ModelSpec(name=self.model, source="script"))
        run(self._client, catalog.put_assets(self.model, self.assets))

    # --- what a test turns ---

    def pause(self) -> None:
        with self._changed:
            self._allowed = 0

    def step(self, steps: int = 1) -> None:
        with self._changed:
            self._allowed = max(0, self._allowed) + steps
            self._changed.notify_all()

    def resume(self) -> None:
        with self._changed:
            self._allowed = -1
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.join()
        if self._lease is not None:
            run(self._client, release(self._lease))
        self._client.close()

    def reset(self) -> None:
        """Back to the default script, nothing paused."""
        self.reply, self.claiming, self.fail_at, self.cached = echo, True, None, None
        self.claimed.clear()
        self.resume()

    # --- the loop ---

    def run(self) -> None:
        while not self._stopping:
            try:
                self._tend()
                self._claim()
                self._step()
            except (EpochOver, RedisUnavailable):
                self._lease = None
                self._running.clear()
            with self._changed:
                if not self._stopping and (self._allowed == 0 or not self._running):
                    self._changed.wait(POLL_S)

    def _tend(self) -> None:
        """Hold the lock and beat, as the pulse of a real rank 0 does."""
        if self._lease is None:
            self._lease = run(self._client, acquire(self.model, "r0", "script", 1))
            if self._lease is None:
                raise RedisUnavailable("another leader holds the lock")
            self._tended = 0.0
            self._adopt, self._after = True, ""
            self._publish()
        if time.monotonic() - self._tended < 0.3:
            return
        beat = health.Beat(
            epoch=self._lease.epoch,
            seq=0,
            oldest_pending_ms=0,
            device="cpu",
            memory_bytes=0,
            phase="ready",
            pid=1,
            host="",
        )
        calls = [renew(self._lease, 1), health.beat(self.model, "r0", 0, beat)]
        for outcome in run_all(self._client, calls):  # type: ignore[arg-type]
            if isinstance(outcome, Exception):
                raise outcome
        self._tended = time.monotonic()

    def _claim(self) -> None:
        assert self._lease is not None
        if not self.claiming:
            return
        room = self.room - len(self._running)
        while self._adopt:
            batch = run(self._client, requests.adopt(self._lease, self._after))
            self._take(batch.requests)
            self._after, self._adopt = batch.after, batch.more
        self._take(run(self._client, requests.claim(self._lease, room, 10**9)).requests)

    def _take(self, claims: list[Claimed]) -> None:
        for claimed in claims:
            params = run(self._client, requests.read_params(self.model, claimed.rid))
            if params is None:
                continue
            log = [entry for page in requests.read_pages(self._client, self.model, claimed.rid) for entry in page]
            held = Held(claimed.rid, claimed.tenant, claimed.priority, params, log)
            self.claimed.append(held)
            self._running[claimed.rid] = self._begin(held)

    def _begin(self, claimed: Held) -> _Running:
        sampling = claimed.params.sampling
        said = self.reply(self.tokenizer.decode(claimed.params.prompt))
        tokens = [*self.tokenizer.encode(said, add_special_tokens=False).ids, self.tokenizer.token_to_id(EOS)]

        def choice() -> _Choice:
            return _Choice(tokens, TextStream(self.tokenizer.decode, sampling.stop, sampling.min_tokens))

        running = _Running(claimed, [choice() for _ in range(sampling.n)], len(claimed.log) + 1)
        for entry in claimed.log:
            before = running.choices[entry.choice]
            before.told += len(entry.prompt or [])
            if entry.token is not None:
                before.text.push(entry.token)
                before.at += 1
            before.over = before.over or entry.finish is not None
        return running

    def _step(self) -> None:
        with self._changed:
            allowed = self._allowed != 0
            if allowed and self._running and self._allowed > 0:
                self._allowed -= 1
        for running in self._running.values() if allowed else ():
            self._speak(running)
        self._emit()

    def _speak(self, running: _Running) -> None:
        """One token for each choice that goes on."""
        sampling = running.claimed.params.sampling
        for index, choice in enumerate(running.choices):
            if choice.over:
                continue
            seq = running.seq + len(running.entries)
            if self.fail_at is not None and seq > self.fail_at:
                choice.over = True
                running.entries.append(LogEntry(seq, index, None, "error", "the logits were not finite"))
                continue
            prompt = running.claimed.params.prompt
            if sampling.prompt_logprobs is not None and choice.told < len(prompt):
                part = range(choice.told, min(choice.told + PROMPT_TOKENS, len(prompt)))
                told = [scripted_score(prompt, place, sampling.prompt_logprobs) for place in part]
                running.entries.append(LogEntry(seq, index, None, prompt=told))
                choice.told = part.stop
                continue
            if not sampling.max_tokens:
                choice.over = True
                running.entries.append(LogEntry(seq, index, None, "length"))
                continue
            token = choice.tokens[choice.at % len(choice.tokens)]
            choice.at += 1
            _, stop = choice.text.push(token)
            finish, cause = None, None
            if token in sampling.stop_ids and choice.at > sampling.min_tokens:
                finish, cause = "stop", "token"
            elif stop is not None:
                finish, cause = "stop", stop
            elif choice.at >= sampling.max_tokens:
                finish, cause = "length", "max_tokens"
            scored = None
            if sampling.logprobs is not None:
                scored = TokenLogprobs(-0.5, [(token, -0.5), (token ^ 1, -1.5)][: sampling.logprobs])
            choice.over = finish is not None
            running.entries.append(
                LogEntry(seq, index, token, finish, cause, scored, self.cached if seq == 1 else None)
            )

    def _emit(self) -> None:
        assert self._lease is not None
        rows = [self._row(running, "finished") for running in self._running.values()]
        result = run(self._client, requests.emit(self._lease, rows))
        for running in list(self._running.values()):
            running.seq += len(running.entries)
            running.entries.clear()
            if all(choice.over for choice in running.choices):
                del self._running[running.claimed.rid]
        for rid in result.taken:
            self._running.pop(rid, None)
        self._end(result.cancelled, "cancelled")
        self._end(result.expired, "expired")

    def _end(self, rids: list[str], state: RequestState) -> None:
        assert self._lease is not None
        for rid in rids:
            running = self._running.pop(rid, None)
            if running is None:
                continue
            for index, choice in enumerate(running.choices):
                if not choice.over:
                    choice.over = True
                    finish = "cancelled" if state == "cancelled" else "expired"
                    seq = running.seq + len(running.entries)
                    running.entries.append(LogEntry(seq, index, None, finish, f"the request was {state}"))
            run(self._client, requests.emit(self._lease, [self._row(running, state)]))

    def _row(self, running: _Running, state: RequestState) -> Emission:
        done = state if all(choice.over for choice in running.choices) else None
        times = {"t_prefill": time.time_ns() // 1_000_000} if running.seq == 1 and running.entries else {}
        return Emission(running.claimed.rid, running.seq, list(running.entries), done, times)
