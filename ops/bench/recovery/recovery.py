"""`furrow bench recovery`: strike ranks and the agent under running requests; time to the next token, and whether it is
the same."""

from __future__ import annotations

import signal
from statistics import median
from typing import Annotated

import click

from ops.bench.recovery.strikes import (
    LENGTH,
    STRIKE_AT,
    TARGETS_MS,
    AgentStrike,
    Strike,
    scene,
    strike,
    strike_agent,
    table,
)
from ops.harness.farm import say
from ops.harness.figures import Figure
from ops.harness.program import Outcome, ShapeOrDemo, benchmark

FAULTS: dict[str, tuple[int, signal.Signals]] = {
    "rank killed": (1, signal.SIGKILL),
    "leader killed": (0, signal.SIGKILL),
    "rank stopped": (1, signal.SIGSTOP),
    "leader stopped": (0, signal.SIGSTOP),
}
PAUSE_LIMIT_S = 0.2
ADOPTION_LIMIT_S = 2.0


@benchmark
def recovery(
    streams: int = 8,
    times: Annotated[int, "Strikes of each kind."] = 5,
    shape: ShapeOrDemo = None,
    length: Annotated[int, click.IntRange(STRIKE_AT + 20), "Tokens of a request."] = LENGTH,
) -> Outcome:
    """Kill ranks and the agent of a private farm (two CPU ranks), and measure each phase of the recovery.

    Each strike waits until the standby process is ready; FURROW_STANDBY=0 measures without one. In float64 the texts
    must be those of the undisturbed run; a random model is in float32, where a near-tie may fall the other way after a
    recovery, and has no limits.
    """
    strikes: dict[str, list[Strike]] = {fault: [] for fault in FAULTS}
    agents: list[AgentStrike] = []
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
        click.echo(f"{fault:<18}{len(mine):>8}{median(gaps):>10.2f}{max(gaps):>10.2f}{same:>12}")
    phases = {fault: [struck.phases for struck in mine] for fault, mine in strikes.items()}
    click.echo(table(phases, TARGETS_MS if shape is None else None))
    everything = [*(one for mine in strikes.values() for one in mine), *agents]
    figures = [
        Figure("streams that ended otherwise than undisturbed", sum(one.streams - one.same for one in everything), 0),
        Figure("agent killed: longest pause of all streams", max(one.pause_s for one in agents), PAUSE_LIMIT_S, "s"),
        Figure("agent killed: adopted after", max(one.adopted_s for one in agents), ADOPTION_LIMIT_S, "s"),
        Figure("agent killed: ranks or epoch replaced", sum(not one.same_processes for one in agents), 0),
    ]
    return Outcome(figures if shape is None else None, {"strikes": strikes, "agents": agents})
