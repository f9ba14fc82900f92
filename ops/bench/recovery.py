"""`furrow bench recovery`: strike ranks under running requests; time to the next token, and whether it is the same."""

from __future__ import annotations

import os
import signal
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import click
from tokenizers import Tokenizer

from control import farm, health, keys
from control.cli.options import model_source
from control.clients import SyncRedis
from control.connection import connect, read, run
from control.messages import GenerationRequest, LogEntry, ModelSpec, Sampling
from control.requests import Enqueue, enqueue, read_log
from ops.bench.farm import private_farm, say
from ops.bench.machine import describe

MODEL = "demo"
PROMPT = "<|im_start|>user\nCount from 1 to 100.<|im_end|>\n<|im_start|>assistant\n"
STRIKE_AT = 40
"""Tokens in the first request's log when the fault strikes."""
LENGTH = 160
LIMIT_S = 120.0

FAULTS: dict[str, tuple[int, signal.Signals]] = {
    "rank killed": (1, signal.SIGKILL),
    "leader killed": (0, signal.SIGKILL),
    "rank stopped": (1, signal.SIGSTOP),
    "leader stopped": (0, signal.SIGSTOP),
}


@dataclass(frozen=True)
class Outcome:
    """One fault: seconds until the next epoch began (the fault was found, a process was there and took the lock) and
    until the first request's log grew again (the group formed, loaded, prefilled); how many ended as undisturbed."""

    fault: str
    epoch_s: float
    gap_s: float
    same: int
    streams: int


@click.command()
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@click.option("--times", type=click.IntRange(1), default=5, show_default=True, help="Strikes of each kind.")
def recovery(streams: int, times: int) -> None:
    """Kill ranks of a private farm (demo, two CPU ranks, float64) and measure the way back.

    Each strike waits until the standby process is ready; FURROW_STANDBY=0 measures without one.
    """
    spec = ModelSpec(name=MODEL, source=model_source("demo"), tp=2, devices=["cpu", "cpu"], dtype="float64")
    click.echo(describe())
    with private_farm(spec, (1,)) as (_, redis_url, _):
        client = connect(redis_url)
        tokenizer = Tokenizer.from_file(f"{spec.source}/tokenizer.json")
        prompt = tokenizer.encode(PROMPT).ids
        [expected] = finished(client, [submit(client, prompt)])
        outcomes = list(strikes(client, prompt, expected, streams, times))
        client.close()
    click.echo(f"{'fault':<16}{'strikes':>8}{'epoch s':>10}{'token s':>10}{'worst s':>10}{'same text':>12}")
    for fault in FAULTS:
        mine = [outcome for outcome in outcomes if outcome.fault == fault]
        gaps = [outcome.gap_s for outcome in mine]
        epoch = statistics.median(outcome.epoch_s for outcome in mine)
        same = f"{sum(outcome.same for outcome in mine)}/{sum(outcome.streams for outcome in mine)}"
        click.echo(
            f"{fault:<16}{len(mine):>8}{epoch:>10.2f}{statistics.median(gaps):>10.2f}{max(gaps):>10.2f}{same:>12}"
        )
    if any(outcome.same != outcome.streams for outcome in outcomes):
        raise SystemExit(1)


def strikes(
    client: SyncRedis, prompt: list[int], expected: list[int | None], streams: int, times: int
) -> Iterator[Outcome]:
    """Each fault in turn, `times` rounds."""
    for _ in range(times):
        for fault, (rank, how) in FAULTS.items():
            epoch = wait_until_whole(client)
            rids = [submit(client, prompt) for _ in range(streams)]
            wait_for_length(client, rids[0], STRIKE_AT)
            beat = health.heartbeats(client, MODEL, "r0", 2)[rank]
            if beat is None:
                raise SystemExit(f"rank {rank} was not there to be struck")
            struck_at, length = time.monotonic(), log_length(client, rids[0])
            os.kill(beat.pid, how)
            # A few tokens may still be on their way: the gap ends with a token of the next epoch.
            while health.read_epoch(client, MODEL, "r0") == epoch:
                length = log_length(client, rids[0])
                pause(struck_at)
            begun = time.monotonic() - struck_at
            wait_for_length(client, rids[0], length + 1, struck_at)
            gap = time.monotonic() - struck_at
            same = sum(answer == expected for answer in finished(client, rids))
            outcome = Outcome(fault, begun, gap, same, streams)
            say(f"{fault}: next token after {gap:.2f} s, {outcome.same}/{streams} as undisturbed")
            yield outcome


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
        raise SystemExit(f"furrow bench recovery: nothing happened for {LIMIT_S:.0f} s")
    time.sleep(0.005)
