"""`furrow bench recovery`: strike ranks under running requests; time to the next token, and whether it is the same."""

from __future__ import annotations

import os
import signal
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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
from ops.bench.phases import TARGETS_MS, Phases, observe, table
from ops.bench.shapes import SHAPES

MODEL = "demo"
PROMPT = "<|im_start|>user\nCount from 1 to 100.<|im_end|>\n<|im_start|>assistant\n"
STRIKE_AT = 40
"""Tokens in the first request's log when the fault strikes."""
LIMIT_S = 120.0

FAULTS: dict[str, tuple[int, signal.Signals]] = {
    "rank killed": (1, signal.SIGKILL),
    "leader killed": (0, signal.SIGKILL),
    "rank stopped": (1, signal.SIGSTOP),
    "leader stopped": (0, signal.SIGSTOP),
}


@dataclass(frozen=True)
class Outcome:
    """One fault: seconds until the first log grew again, and where they went; how many answers were as undisturbed."""

    fault: str
    gap_s: float
    phases: Phases
    same: int
    streams: int


@click.command()
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@click.option("--times", type=click.IntRange(1), default=5, show_default=True, help="Strikes of each kind.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model in float32 [default: demo in float64].")
@click.option(
    "--length", type=click.IntRange(STRIKE_AT + 20), default=160, show_default=True, help="Tokens of a request."
)
def recovery(streams: int, times: int, shape: str | None, length: int) -> None:
    """Kill ranks of a private farm (two CPU ranks) and measure the way back, phase by phase.

    Each strike waits until the standby process is ready; FURROW_STANDBY=0 measures without one. In float64 the texts
    must be those of the undisturbed run; in float32 a near-tie may fall the other way after a recovery.
    """
    click.echo(describe())
    with ExitStack() as stack:
        source = model_source("demo")
        if shape is not None:
            from ops.bench.random_model import build  # needs torch, which the demonstration model does not

            source = str(build(shape, Path(stack.enter_context(TemporaryDirectory(prefix="furrow-bench-"))), "float32"))
        dtype = "float64" if shape is None else "float32"
        spec = ModelSpec(name=MODEL, source=source, tp=2, devices=["cpu", "cpu"], dtype=dtype)
        _, redis_url, _ = stack.enter_context(private_farm(spec, (1,)))
        client = stack.enter_context(connect(redis_url))
        prompt = Tokenizer.from_file(f"{source}/tokenizer.json").encode(PROMPT).ids
        [expected] = finished(client, [submit(client, prompt, length)])
        outcomes = list(strikes(client, prompt, expected, streams, times))
    click.echo(f"{'fault':<18}{'strikes':>8}{'token s':>10}{'worst s':>10}{'same text':>12}")
    by_fault = {fault: [outcome for outcome in outcomes if outcome.fault == fault] for fault in FAULTS}
    for fault, mine in by_fault.items():
        gaps = [outcome.gap_s for outcome in mine]
        same = f"{sum(outcome.same for outcome in mine)}/{sum(outcome.streams for outcome in mine)}"
        click.echo(f"{fault:<18}{len(mine):>8}{statistics.median(gaps):>10.2f}{max(gaps):>10.2f}{same:>12}")
    phases = {fault: [outcome.phases for outcome in mine] for fault, mine in by_fault.items()}
    click.echo(table(phases, TARGETS_MS if shape is None else None))
    if shape is None and any(outcome.same != outcome.streams for outcome in outcomes):
        raise SystemExit(1)


def strikes(
    client: SyncRedis, prompt: list[int], expected: list[int | None], streams: int, times: int
) -> Iterator[Outcome]:
    """Each fault in turn, `times` rounds."""
    for _ in range(times):
        for fault, (rank, how) in FAULTS.items():
            epoch = wait_until_whole(client)
            rids = [submit(client, prompt, len(expected)) for _ in range(streams)]
            wait_for_length(client, rids[0], STRIKE_AT)
            beat = health.heartbeats(client, MODEL, "r0", 2)[rank]
            if beat is None:
                raise SystemExit(f"rank {rank} was not there to be struck")
            length = log_length(client, rids[0])
            struck_at, struck_ms = time.monotonic(), int(time.time() * 1000)
            os.kill(beat.pid, how)
            # A few tokens may still be on their way: the gap ends with a token of the next epoch.
            while health.read_epoch(client, MODEL, "r0") == epoch:
                length = log_length(client, rids[0])
                pause(struck_at)
            wait_for_length(client, rids[0], length + 1, struck_at)
            gap, token_ms = time.monotonic() - struck_at, int(time.time() * 1000)
            same = sum(answer == expected for answer in finished(client, rids))
            phases = observe(client, MODEL, "r0", epoch, struck_ms, token_ms)
            outcome = Outcome(fault, gap, phases, same, streams)
            say(f"{fault}: next token after {gap:.2f} s, {outcome.same}/{streams} as undisturbed")
            yield outcome


def submit(client: SyncRedis, prompt: list[int], length: int) -> str:
    """Enqueue one greedy request of at most `length` tokens."""
    sampling = Sampling(max_tokens=length, temperature=0.0)
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
