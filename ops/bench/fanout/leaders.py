"""Leaders without a model.

`StreamLoad` says which client's next token is due when. When each token left its leader is in shared memory between the
process that emits and the one that reads (`Ring`).
"""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from control import requests
from control.messages import GenerationRequest, ModelAssets, ModelSpec
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect, connect_blocking, run
from control.replicas.commands import wait_for_work
from control.requests import Claimed, Emission
from ops.demo import MODEL_DIR
from ops.harness.processes import until_terminated
from ops.harness.scripted_leader import ScriptedLeader
from worker.leader.request import RunningRequest

MODEL = "scripted"
_CONTEXT = 1 << 20
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")
_BLOCK_MS = 200
TEXT = (
    "A lighthouse keeper counted the ships that passed before the storm, wrote each name down, "
    "and then, when the wind had gone, she lit the lamp again and waited for the morning. "
)
"""The text of every stream, repeated."""
CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "'
"""As the demonstration model begins a call; the text follows."""
TOOL = {
    "type": "function",
    "function": {"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """`clients` streams of `rate` tokens a second each, served by `replicas` groups that step in turn."""

    clients: int
    replicas: int
    rate: float
    tokens: int
    """Of one answer; then its client asks again."""
    calls: bool = False
    """Each answer is the beginning of one call, whose argument is the text."""

    @property
    def slots(self) -> int:
        """Most streams of one replica."""
        return -(-self.clients // self.replicas)

    @property
    def pause(self) -> float:
        """Seconds between the steps of one replica and the next one."""
        return 1 / (self.rate * self.replicas)

    def first_answer(self, client: int) -> int:
        """Tokens of a client's first answer: shorter for most, so that the answers end one after the other."""
        return max(2, self.tokens * (client + 1) // self.clients)

    def ticks(self) -> Iterator[tuple[int, float]]:
        """The replica whose step is due, and by how many seconds it is late; a late one is not left out."""
        due = time.monotonic()
        while True:
            for replica in range(self.replicas):
                due += self.pause
                wait = due - time.monotonic()
                if wait > 0:
                    time.sleep(wait)
                yield replica, max(0.0, -wait)


TOKENS = 1024
"""Of each client's tokens the last ones are kept; a reader that is further behind is not timed any more."""
_DOUBLE = 8


class Ring:
    """Seconds at which token `seq` of `client` was handed to Redis, for `clients` clients, by the host's monotonic
    clock."""

    def __init__(self, path: Path, clients: int) -> None:
        size = clients * TOKENS * _DOUBLE
        with path.open("r+b" if path.exists() else "w+b") as file:
            if path.stat().st_size < size:
                file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self.times = memoryview(self._memory).cast("d")
        """By `client * TOKENS + seq % TOKENS`: plain, because both sides use it for every token."""


def demo_assets() -> ModelAssets:
    """The demonstration model's tokenizer and template."""
    config = msgspec.json.decode((MODEL_DIR / "tokenizer_config.json").read_bytes())
    text = (MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(text)
    end = tokenizer.token_to_id(config["eos_token"])
    assert end is not None, "the tokenizer has its own end-of-sequence token"
    return ModelAssets(
        tokenizer_json=text,
        tokenizer_config=config,
        chat_template=(MODEL_DIR / "chat_template.jinja").read_text(encoding="utf-8"),
        generation_config={},
        context_length=_CONTEXT,
        vocab_size=tokenizer.get_vocab_size(),
        eos_ids=[end],
        kv_tokens=1 << 30,
        created=int(time.time()),
    )


def publish(client: SyncRedis, model: str = MODEL, assets: ModelAssets | None = None) -> tuple[Tokenizer, list[int]]:
    """Put `model` into the catalog, by default with the demonstration model's assets; its tokenizer, and what every
    stream says."""
    assets = assets or demo_assets()
    catalog.put_spec(client, ModelSpec(name=model, source="scripted"))
    run(client, catalog.put_assets(model, assets))
    tokenizer = Tokenizer.from_str(assets.tokenizer_json)
    return tokenizer, tokenizer.encode(TEXT, add_special_tokens=False).ids


def number_of(params: GenerationRequest, tokenizer: Tokenizer) -> int:
    """The number that the client put at the end of its message."""
    number = _LAST_NUMBER.search(tokenizer.decode(params.prompt))
    if number is None:
        raise ValueError("a prompt without a number was claimed")
    return int(number[0])


class Replica(ScriptedLeader):
    """Leads as many streams as it has slots, and writes to the ring when each token leaves."""

    def __init__(
        self, client: SyncRedis, name: str, load: StreamLoad, tokenizer: Tokenizer, tokens: Sequence[int], ring: Ring
    ) -> None:
        super().__init__(client, MODEL, name, tokenizer.decode, self._answer, load.slots)
        self._load = load
        self._text = list(tokens)
        self._call: list[int] = tokenizer.encode(CALL, add_special_tokens=False).ids
        self._tokenizer = tokenizer
        self._ring = ring
        self.numbers: dict[str, int] = {}
        """The client of each request."""

    def _answer(self, params: GenerationRequest) -> Sequence[int]:
        if not self._load.calls:
            return self._text
        return [*self._call, *self._text * -(-params.sampling.max_tokens // len(self._text))]

    def on_claim(self, claimed: Claimed, request: RunningRequest) -> None:
        self.numbers[claimed.rid] = number_of(request.params, self._tokenizer)

    def before_emit(self, emissions: Collection[Emission]) -> None:
        now = time.monotonic()
        times = self._ring.times
        numbers = self.numbers
        for emission in emissions:
            times[numbers[emission.rid] * TOKENS + emission.seq % TOKENS] = now


def lead(ring: Path, redis_url: str, load: StreamLoad, whole: bool = False) -> dict[str, Any]:
    """Lead until SIGTERM; what was done. `whole`: one replica answers each request with all of its tokens at once."""
    stopped = until_terminated()
    client = connect(redis_url)
    tokenizer, tokens = publish(client)
    times = Ring(ring, load.clients)
    names = ["r0"] if whole else [f"r{index}" for index in range(load.replicas)]
    replicas = [Replica(client, name, load, tokenizer, tokens, times) for name in names]
    if whole:
        counts = answer_whole(replicas[0], redis_url, times, stopped)
    else:
        counts = step_in_turn(replicas, load, stopped)
    for replica in replicas:
        replica.leave()
    client.close()
    return counts


def step_in_turn(replicas: Sequence[ScriptedLeader], load: StreamLoad, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Every replica's steps at their moments. `late_ms` is the worst delay of one: this process or Redis was busy."""
    tokens = 0
    worst = 0.0
    began = time.monotonic()
    for replica, late in load.ticks():
        if stopped() and not any(leader.running for leader in replicas):
            break
        tokens += replicas[replica].turn()
        for leader in replicas:  # slow ones keep their locks between their steps
            leader.tend()
        worst = max(worst, late)
    return {"tokens": tokens, "late_ms": 1000 * worst, "seconds": time.monotonic() - began}


def answer_whole(replica: Replica, url: str, ring: Ring, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Each request's answer in one step; the ring tells how many seconds its leader had it."""
    client = connect(url)
    blocking = connect_blocking(url)
    answered = 0
    bell = "0"
    while not stopped():
        replica.tend()
        claims = run(client, requests.claim(replica.lease, 64, requests.ANY_TOKENS))
        had_at = time.monotonic()
        bell = claims.bell
        replica.take(claims)
        for request in replica.running.values():
            while request.live:
                replica.speak(request)
            ring.times[replica.numbers[request.rid] * TOKENS] = time.monotonic() - had_at
            run(client, requests.emit(replica.lease, [request.emission(most=len(request.history))]))
            answered += 1
        replica.running.clear()
        if not claims.requests:
            wait_for_work(blocking, replica.lease, bell, _BLOCK_MS)
    return {"answered": answered}
