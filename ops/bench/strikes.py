"""Striking the ranks of a private farm while it works: what the benchmarks of recovery and of hangs share."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenizers import Tokenizer

from control import farm, health, keys
from control.cli.options import model_source
from control.clients import SyncRedis
from control.connection import connect, read, run
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.requests import Enqueue, enqueue, read_log
from ops.bench.farm import private_farm

MODEL = "demo"
PROMPT = "<|im_start|>user\nCount from 1 to 100.<|im_end|>\n<|im_start|>assistant\n"
STRIKE_AT = 40
"""Tokens in the first request's log when the fault strikes."""
LENGTH = 160
LIMIT_S = 120.0


@dataclass(frozen=True)
class Scene:
    """A farm of the demonstration model (two CPU ranks, float64), and what it says to PROMPT when undisturbed."""

    client: SyncRedis
    prompt: list[int]
    expected: list[int | None]


@dataclass(frozen=True)
class Strike:
    """One signal under load: seconds until the epoch was poisoned (the fault was found), until the next epoch began (a
    process was there and took the lock) and until the first request's log grew again (the group formed, loaded,
    prefilled); how many of the streams ended as undisturbed."""

    poison_s: float
    epoch_s: float
    gap_s: float
    same: int
    streams: int


@contextmanager
def scene() -> Iterator[Scene]:
    """Raises ModelUnavailable where the farm can't be started."""
    spec = ModelSpec(name=MODEL, source=model_source("demo"), tp=2, devices=["cpu", "cpu"], dtype="float64")
    with private_farm(spec, (1,)) as (_, redis_url, _):
        client = connect(redis_url)
        prompt = Tokenizer.from_file(f"{spec.source}/tokenizer.json").encode(PROMPT).ids
        [expected] = finished(client, [submit(client, prompt)])
        yield Scene(client, prompt, expected)
        client.close()


def strike(scene: Scene, streams: int, rank: int, how: signal.Signals) -> Strike:
    """Start `streams` requests and send `how` to the rank's process in the midst of them."""
    client = scene.client
    epoch = wait_until_whole(client)
    rids = [submit(client, scene.prompt) for _ in range(streams)]
    wait_for_length(client, rids[0], STRIKE_AT)
    beat = health.heartbeats(client, MODEL, "r0", 2)[rank]
    if beat is None:
        raise SystemExit(f"rank {rank} was not there to be struck")
    struck_at, length, poison_s = time.monotonic(), log_length(client, rids[0]), 0.0
    os.kill(beat.pid, how)
    # A few tokens may still be on their way: the gap ends with a token of the next epoch.
    while health.read_epoch(client, MODEL, "r0") == epoch:
        length = log_length(client, rids[0])
        if not poison_s and is_poisoned(client, epoch):
            poison_s = time.monotonic() - struck_at
        pause(struck_at)
    epoch_s = time.monotonic() - struck_at
    if not is_poisoned(client, epoch):
        raise SystemExit(f"epoch {epoch} ended without poison: the strike was not what ended it")
    wait_for_length(client, rids[0], length + 1, struck_at)
    gap_s = time.monotonic() - struck_at
    same = sum(answer == scene.expected for answer in finished(client, rids))
    return Strike(poison_s or epoch_s, epoch_s, gap_s, same, streams)


def is_poisoned(client: SyncRedis, epoch: int) -> bool:
    """Whether the history has that epoch."""
    return any(poison.epoch == epoch for poison in run(client, health.poison_history(MODEL, "r0")))


def submit(client: SyncRedis, prompt: list[int]) -> str:
    """Enqueue one greedy request of LENGTH tokens."""
    sampling = Sampling(max_tokens=LENGTH, temperature=0.0)
    params = GenerationRequest(prompt=prompt, sampling=sampling)
    return run(client, enqueue(Enqueue(rid=uuid.uuid4().hex, model=MODEL, params=params, tenant="bench"))).rid


def log_of(client: SyncRedis, rid: str) -> list[LogEntry]:
    return run(client, read_log(MODEL, rid, 0))


def log_length(client: SyncRedis, rid: str) -> int:
    return len(log_of(client, rid))


def wait_for_length(client: SyncRedis, rid: str, length: int, since: float | None = None) -> None:
    since = since or time.monotonic()
    while log_length(client, rid) < length:
        pause(since)


def finished(client: SyncRedis, rids: list[str]) -> list[list[int | None]]:
    """The tokens of each request, once all have ended."""
    since = time.monotonic()
    for rid in rids:
        while not (entries := log_of(client, rid)) or entries[-1].finish is None:
            pause(since)
    return [[entry.token for entry in log_of(client, rid)] for rid in rids]


def wait_until_whole(client: SyncRedis) -> int:
    """Until every rank is ready in the current epoch, which is returned, and a standby waits where one is kept."""
    since = time.monotonic()
    kept = os.environ.get("FURROW_STANDBY") != "0"
    while health.overview(client, MODEL).state != "loaded" or (kept and standby_state(client) != "ready"):
        pause(since)
    return health.read_epoch(client, MODEL, "r0")


def standby_state(client: SyncRedis) -> str | None:
    """What the only host says of its standby."""
    [host] = farm.known_hosts(client)
    return run(client, read("HGET", keys.host(host), "standby", parse=lambda reply: reply))


def pause(since: float) -> None:
    """A short breath; gives up when `since` is too long ago."""
    if time.monotonic() - since > LIMIT_S:
        raise SystemExit(f"furrow bench: nothing happened for {LIMIT_S:.0f} s")
    time.sleep(0.005)
