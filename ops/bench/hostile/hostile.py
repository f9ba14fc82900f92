"""`furrow bench hostile`: the delay of other clients and the memory of an API process under attack."""

from __future__ import annotations

import os
from typing import Annotated

import click

from ops.bench.hostile import attacks, rows
from ops.harness.figures import Figure
from ops.harness.processes import split_cores
from ops.harness.program import Outcome, benchmark

ATTACKS = "attacks"
SECONDS = 15.0
"""Duration of each run of the attacks."""


@benchmark
def hostile(
    names: Annotated[
        tuple[str, ...], "--row", click.Choice([ATTACKS, *rows.NAMES]), "Row to measure. Repeatable.  [default: all]"
    ] = (),
    seconds: Annotated[
        float | None,
        click.FloatRange(min=0, min_open=True),
        "Duration of each row.  [default: attacks: 15 for each run, cut: 30, burst and others: 15 to 20]",
    ] = None,
    clients: Annotated[int, "Row attacks: number of polite streams."] = 100,
    runs: Annotated[int, "Row attacks: pairs of runs, with and without attacks."] = 3,
    control: Annotated[
        str | None,
        click.Choice(list(rows.CONTROLS)),
        "Switch one mechanism of the API process off; figures of its rows must then miss their limits.",
    ] = None,
) -> Outcome:
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
    figures = list[Figure]()
    if ATTACKS in names or not names:
        figures += attacks.measure(own, others, clients, seconds or SECONDS, runs)
    chosen = [name for name in rows.NAMES if name in names or not names]
    if chosen:
        figures += rows.figures(rows.measure(own, others, chosen, seconds))
    return Outcome(figures)
