"""`furrow bench recovery`: strike ranks and the agent under running requests; time to the next token, and whether it is
the same."""

from __future__ import annotations

import signal
import statistics

import click

from ops.bench.common.farm import say
from ops.bench.common.machine import describe
from ops.bench.common.shapes import SHAPES
from ops.bench.recovery.agent_strikes import describe_agent_strikes, strike_agent
from ops.bench.recovery.phases import TARGETS_MS, table
from ops.bench.recovery.strikes import LENGTH, STRIKE_AT, Strike, scene, strike

FAULTS: dict[str, tuple[int, signal.Signals]] = {
    "rank killed": (1, signal.SIGKILL),
    "leader killed": (0, signal.SIGKILL),
    "rank stopped": (1, signal.SIGSTOP),
    "leader stopped": (0, signal.SIGSTOP),
}


@click.command()
@click.option("--streams", type=click.IntRange(1), default=8, show_default=True)
@click.option("--times", type=click.IntRange(1), default=5, show_default=True, help="Strikes of each kind.")
@click.option("--shape", type=click.Choice(list(SHAPES)), help="A random model in float32 [default: demo in float64].")
@click.option(
    "--length", type=click.IntRange(STRIKE_AT + 20), default=LENGTH, show_default=True, help="Tokens of a request."
)
def recovery(streams: int, times: int, shape: str | None, length: int) -> None:
    """Kill ranks and the agent of a private farm (two CPU ranks), and measure each phase of the recovery.

    Each strike waits until the standby process is ready; FURROW_STANDBY=0 measures without one. In float64 the texts
    must be those of the undisturbed run; in float32 a near-tie may fall the other way after a recovery.
    """
    click.echo(describe())
    strikes: dict[str, list[Strike]] = {fault: [] for fault in FAULTS}
    agents = []
    with scene(shape, length) as farm:
        for _ in range(times):
            for fault, (rank, how) in FAULTS.items():
                struck = strike(farm, streams, rank, how)
                strikes[fault].append(struck)
                say(f"{fault}: next token after {struck.gap_s:.2f} s, {struck.same}/{streams} as undisturbed")
            agents.append(strike_agent(farm, streams))
            say(f"agent killed: no token for {agents[-1].pause_s:.3f} s, adopted after {agents[-1].adopted_s:.2f} s")
    click.echo(f"{'fault':<18}{'strikes':>8}{'token s':>10}{'worst s':>10}{'same text':>12}")
    for fault, mine in strikes.items():
        gaps = [struck.gap_s for struck in mine]
        same = f"{sum(struck.same for struck in mine)}/{sum(struck.streams for struck in mine)}"
        click.echo(f"{fault:<18}{len(mine):>8}{statistics.median(gaps):>10.2f}{max(gaps):>10.2f}{same:>12}")
    click.echo(describe_agent_strikes(agents))
    phases = {fault: [struck.phases for struck in mine] for fault, mine in strikes.items()}
    click.echo(table(phases, TARGETS_MS if shape is None else None))
    if shape is None and any(struck.same != struck.streams for mine in strikes.values() for struck in mine):
        raise SystemExit(1)
    if shape is None and not all(struck.holds for struck in agents):
        raise SystemExit(1)
