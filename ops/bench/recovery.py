"""`furrow bench recovery`: strike ranks under running requests; time to the next token, and whether it is the same."""

from __future__ import annotations

import signal
import statistics

import click

from ops.bench.farm import say
from ops.bench.machine import describe
from ops.bench.strikes import Strike, scene, strike

FAULTS: dict[str, tuple[int, signal.Signals]] = {
    "rank killed": (1, signal.SIGKILL),
    "leader killed": (0, signal.SIGKILL),
    "rank stopped": (1, signal.SIGSTOP),
    "leader stopped": (0, signal.SIGSTOP),
}


@click.command()
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@click.option("--times", type=click.IntRange(1), default=5, show_default=True, help="Strikes of each kind.")
def recovery(streams: int, times: int) -> None:
    """Kill ranks of a private farm (demo, two CPU ranks, float64) and measure the way back.

    Each strike waits until the standby process is ready; FURROW_STANDBY=0 measures without one.
    """
    click.echo(describe())
    strikes: dict[str, list[Strike]] = {fault: [] for fault in FAULTS}
    with scene() as farm:
        for _ in range(times):
            for fault, (rank, how) in FAULTS.items():
                struck = strike(farm, streams, rank, how)
                strikes[fault].append(struck)
                say(f"{fault}: next token after {struck.gap_s:.2f} s, {struck.same}/{streams} as undisturbed")
    click.echo(f"{'fault':<16}{'strikes':>8}{'epoch s':>10}{'token s':>10}{'worst s':>10}{'same text':>12}")
    for fault, mine in strikes.items():
        gaps = [struck.gap_s for struck in mine]
        epoch = statistics.median(struck.epoch_s for struck in mine)
        same = f"{sum(struck.same for struck in mine)}/{sum(struck.streams for struck in mine)}"
        click.echo(
            f"{fault:<16}{len(mine):>8}{epoch:>10.2f}{statistics.median(gaps):>10.2f}{max(gaps):>10.2f}{same:>12}"
        )
    if any(struck.same != struck.streams for mine in strikes.values() for struck in mine):
        raise SystemExit(1)
