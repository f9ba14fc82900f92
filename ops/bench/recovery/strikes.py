"""Striking the ranks of a private farm while it works: what the benchmarks of recovery and of hangs share."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer

from control.clock import now_ms
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.placement import farm
from control.redis.clients import SyncRedis
from control.redis.connection import connect, run
from control.replicas import health
from control.requests import Enqueue, enqueue, read_pages
from control.settings import keeps_standby
from ops.bench.common.farm import private_farm
from ops.bench.recovery.phases import Phases, observe, poisoned_at
from ops.common.waiting import until
from ops.demo import MODEL_DIR

MODEL = "demo"
LENGTH = 160
"""Tokens of a request, unless said otherwise."""
PROMPT = "<|im_start|>user\nCount from 1 to 100.<|im_end|>\n<|im_start|>assistant\n"
STRIKE_AT = 40
"""Tokens in the first request's log when the fault strikes."""
LIMIT_S = 120.0
TICK_S = 0.005


@dataclass(frozen=True)
class Scene:
    """A farm of one model on two CPU ranks, and what it says to PROMPT when undisturbed."""

    client: SyncRedis
    prompt: list[int]
    expected: list[int | None]


@dataclass(frozen=True)
class Strike:
    """One signal under load: seconds until the first request's log grew again, and where they went; how many of the
    streams ended as undisturbed."""

    gap_s: float
    phases: Phases
    same: int
    streams: int

    @property
    def found_s(self) -> float:
        """Seconds until the epoch was poisoned."""
        return self.phases.detect / 1000


@contextmanager
def scene(shape: str | None = None, length: int = LENGTH) -> Generator[Scene]:
    """The demonstration model in float64, or a random one of that shape in float32; requests of `length` tokens.

    Raises ModelUnavailable where the farm can't be started.
    """
    with ExitStack() as stack:
        source, dtype = str(MODEL_DIR), "float64"
        if shape is not None:
            from ops.bench.common.random_model import build  # needs torch, which the demonstration model does not

            folder = Path(stack.enter_context(TemporaryDirectory(prefix="furrow-bench-")))
            source, dtype = str(build(shape, folder, "float32")), "float32"
        spec = ModelSpec(name=MODEL, source=source, tp=2, devices=["cpu", "cpu"], dtype=dtype)
        _, redis_url, _ = stack.enter_context(private_farm(spec, (1,)))
        client = stack.enter_context(connect(redis_url))
        prompt = Tokenizer.from_file(f"{source}/tokenizer.json").encode(PROMPT).ids
        [expected] = finished(client, [submit(client, prompt, length)])
        yield Scene(client, prompt, expected)


def strike(scene: Scene, streams: int, rank: int, how: signal.Signals) -> Strike:
    """Start `streams` requests and send `how` to the rank's process in the midst of them."""
    client = scene.client
    epoch = wait_until_whole(client)
    rids = [submit(client, scene.prompt, len(scene.expected)) for _ in range(streams)]
    wait_for_length(client, rids[0], STRIKE_AT)
    beat = health.heartbeats(client, MODEL, "r0", 2)[rank]
    if beat is None:
        raise SystemExit(f"rank {rank} was not there to be struck")
    length = log_length(client, rids[0])
    struck_at, struck_ms = time.monotonic(), now_ms()
    os.kill(beat.pid, how)

    def epoch_ended() -> bool:
        nonlocal length
        if health.read_epoch(client, MODEL, "r0") != epoch:
            return True
        length = log_length(client, rids[0])
        return False

    # A few tokens may still be on their way: the gap ends with a token of the next epoch.
    until(epoch_ended, f"the end of epoch {epoch}", LIMIT_S, TICK_S)
    if not poisoned_at(client, MODEL, "r0", epoch):
        raise SystemExit(f"epoch {epoch} ended without poison: the strike was not what ended it")
    wait_for_length(client, rids[0], length + 1)
    gap_s, token_ms = time.monotonic() - struck_at, now_ms()
    same = sum(answer == scene.expected for answer in finished(client, rids))
    return Strike(gap_s, observe(client, MODEL, "r0", epoch, struck_ms, token_ms), same, streams)


def submit(client: SyncRedis, prompt: list[int], length: int = LENGTH) -> str:
    """Enqueue one greedy request of at most `length` tokens."""
    sampling = Sampling(max_tokens=length, temperature=0.0)
    params = GenerationRequest(prompt=prompt, sampling=sampling)
    return run(client, enqueue(Enqueue(rid=uuid.uuid4().hex, model=MODEL, params=params, tenant="bench"))).rid


def log_of(client: SyncRedis, rid: str) -> list[LogEntry]:
    return [entry for page in read_pages(client, MODEL, rid) for entry in page]


def log_length(client: SyncRedis, rid: str) -> int:
    return len(log_of(client, rid))


def wait_for_length(client: SyncRedis, rid: str, length: int) -> None:
    until(lambda: log_length(client, rid) >= length, f"token {length} of request {rid}", LIMIT_S, TICK_S)


def finished(client: SyncRedis, rids: list[str]) -> list[list[int | None]]:
    """The tokens of each request, once all have ended."""

    def ended(rid: str) -> bool:
        entries = log_of(client, rid)
        return bool(entries) and entries[-1].finish is not None

    for rid in rids:
        until(lambda rid=rid: ended(rid), f"the end of request {rid}", LIMIT_S, TICK_S)
    return [[entry.token for entry in log_of(client, rid)] for rid in rids]


def wait_until_whole(client: SyncRedis) -> int:
    """Until every rank is ready in the current epoch, which is returned, and a standby is ready where one is kept."""
    kept = keeps_standby()

    def whole() -> bool:
        loaded = health.overview(client, MODEL).state == "loaded"
        return loaded and (not kept or farm.standbys(client) == ["ready"])

    until(whole, "every rank is ready", LIMIT_S, TICK_S)
    return health.read_epoch(client, MODEL, "r0")
