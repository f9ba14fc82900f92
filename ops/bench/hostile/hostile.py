"""`furrow bench hostile`: the delay of other clients and the memory of an API process under attack."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import msgspec

from control import access
from control.redis.connection import connect
from ops.bench.fanout.fanout import BENCH, api, leaders, wait_for_end, wait_for_model
from ops.bench.fanout.leaders import Load
from ops.bench.hostile import attacks, rows
from ops.harness.farm import say
from ops.harness.figures import Figure
from ops.harness.processes import looking, resident, running, split_cores
from ops.harness.program import Outcome, benchmark, option
from ops.local.embedded import EmbeddedServer

LATER_MS = 100.0
"""At p99.9, above an undisturbed run."""
GROWTH_MIB = 64.0
HEADER_TIMEOUT_S = 2.0
"""Of the API process, so that slow attempts end several times in a run."""
RATE = 20.0
REPLICAS = 4
TOKENS = 1000
LOOK_EVERY_S = 0.1
ATTACKS = "attacks"
SECONDS = 15.0
"""Duration of each run of the attacks."""


@benchmark
@click.option(
    "--row",
    "names",
    multiple=True,
    type=click.Choice([ATTACKS, *rows.NAMES]),
    help="Row to measure. Repeatable.  [default: all]",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Duration of each row.  [default: attacks: 15 for each run, cut: 30, burst and others: 15 to 20]",
)
@option("--clients", 100, "Row attacks: number of polite streams.")
@option("--runs", 3, "Row attacks: pairs of runs, with and without attacks.")
@click.option(
    "--control",
    type=click.Choice(list(rows.CONTROLS)),
    help="Switch one mechanism of the API process off; figures of its rows must then miss their limits.",
)
def hostile(names: tuple[str, ...], seconds: float | None, clients: int, runs: int, control: str | None) -> Outcome:
    """Attack an API process that has a core of its own, and measure its other clients.

    Row attacks: polite streams with and without HTTP attacks. Leaders without a model emit through Redis and stamp each
    token, as in `ops.bench.fanout.fanout`: the delay of a token shows the load of the API process, and not that of a
    model.

    \b
    All other rows: one API key against another tenant.
      cut-N     N connections send a stream and close after 5 ms, again and again
      burst-N   N streams at once, again when all are answered
      loop-N    N kept-alive connections send the next chat after each answer
      wait-N    N streams wait in the queue
      model-files  4 connections ask models whose chat template or tokenizer wants all time or memory
    Meanwhile the other tenant sends a short stream every 130 ms, and a prober gets /health every 50 ms, both by turns
    on new and on kept connections. Their times begin when a request is due; the lateness of their process is in each
    figure and is shown beside it. Row admission: the processor time of the API for each chat of a burst that waits.

    The steps for clients that had gone count the tokens that leaders computed for requests whose connection was closed
    before they were claimed, as a share of all tokens of the row. The leaders have no model: a rank does one forward
    for each of these tokens, the first one with the whole prompt, so that the share is that of its work.

    The exit status is 1 if a figure misses its limit or if an attack is not refused. With --control it is 1 if a figure
    holds that must not. All connections are on loopback.
    """
    if control is not None and names:
        raise click.UsageError("--control has rows of its own: leave --row out")
    own, others = split_cores()
    os.sched_setaffinity(0, others)
    if control is not None:
        sabotage = rows.CONTROLS[control]
        outcome = rows.measure(own, others, rows.rows_of(sabotage), seconds, sabotage)
        rows.judge(sabotage, rows.figures(outcome))
        return Outcome()
    found = list[Figure]()
    if ATTACKS in names or not names:
        found += _attacks(own, others, clients, seconds or SECONDS, runs)
    chosen = [name for name in rows.NAMES if name in names or not names]
    if chosen:
        found += rows.figures(rows.measure(own, others, chosen, seconds))
    return Outcome(found)


def _attacks(own: set[int], others: set[int], clients: int, seconds: float, runs: int) -> list[Figure]:
    """Polite streams with and without HTTP attacks."""
    polite = Load(clients, REPLICAS, RATE, TOKENS)
    served = Load(clients + 1, REPLICAS, RATE, TOKENS)  # with the attackers' client, whose number comes last
    calm = list[float]()
    disturbed = list[float]()
    memory = list[float]()
    tried = list[dict[str, attacks.Tried]]()
    with (
        TemporaryDirectory(prefix="furrow-bench-") as folder,
        EmbeddedServer(Path(folder) / "redis") as url,
        api(own, url, "--header-timeout", str(HEADER_TIMEOUT_S)) as (part, address),
        leaders(others, Path(folder) / "ring", url, served),
    ):
        wait_for_model(address)
        key = _key(url)
        for run in range(1, runs + 1):
            say(f"run {run} of {runs}: {clients} streams for {seconds:g} s, then again with attacks")
            calm.append(_lateness(others, Path(folder), address, polite, seconds))
            settled = resident(part.pid)
            with (
                looking(lambda settled=settled: memory.append(resident(part.pid) - settled), LOOK_EVERY_S),
                _attackers(others, address, key, clients, seconds, tried),
            ):
                disturbed.append(_lateness(others, Path(folder), address, polite, seconds))
    for before, after in zip(calm, disturbed, strict=True):
        click.echo(f"p99.9 from emit to socket: undisturbed {before:.1f} ms, attacked {after:.1f} ms")
    return figures(calm, disturbed, memory, tried)


def figures(
    calm: list[float], disturbed: list[float], memory: list[float], tried: list[dict[str, attacks.Tried]]
) -> list[Figure]:
    """The figures with limits; `memory` is the growth at each sample, in MiB."""
    found = [
        Figure("p99.9 of tokens, above an undisturbed run", median(disturbed) - median(calm), LATER_MS, "ms"),
        Figure("growth of the API's memory", max(memory), GROWTH_MIB, "MiB"),
    ]
    for one in (*attacks.QUICK, *attacks.SLOW):
        name = attacks.name_of(one)
        made, refused = (sum(run.get(name, (0, 0))[side] for run in tried) for side in (0, 1))
        found.append(Figure(f"{name}: refused of {made}", refused, max(1, made), at_least=True))
    return found


def _lateness(cores: set[int], folder: Path, address: str, load: Load, seconds: float) -> float:
    """Milliseconds at p99.9 from emit to the client's socket."""
    arguments = ["--address", address, "--ring", str(folder / "ring"), "--load", _json(load), "--seconds", str(seconds)]
    with running(cores, f"{BENCH}.readers", *arguments) as readers:
        assert readers.line() == "begin\n"
        arrivals = json.loads(readers.line())
    wait_for_end(address)
    return float(arrivals["p999_ms"])


@contextmanager
def _attackers(
    cores: set[int], address: str, key: str, spare: int, seconds: float, tried: list[dict[str, attacks.Tried]]
) -> Generator[None]:
    arguments = ["--address", address, "--key", key, "--spare", str(spare), "--seconds", str(seconds)]
    with running(cores, "ops.bench.hostile.attacks", *arguments) as part:
        yield
        tried.append({name: (made, refused) for name, (made, refused) in json.loads(part.line()).items()})


def _key(redis_url: str) -> str:
    client = connect(redis_url)
    key, secret = access.mint()
    access.create(client, key)
    client.close()
    return secret


def _json(load: Load) -> str:
    return msgspec.json.encode(load).decode()
