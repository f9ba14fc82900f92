"""`furrow bench scale`: what the control plane takes at real size, without any model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from statistics import mean
from typing import Annotated

import click

from control.redis.clients import SyncRedis
from control.redis.connection import connect, connect_blocking
from control.replicas.lease import Lease
from ops.bench.scale.acts import Acts, succeed
from ops.bench.scale.clock import Round, ServerClock, control_loop, figure_of, head, row, sent_by, timed
from ops.bench.scale.crowd import Size, fill
from ops.bench.scale.processes import Agents, ApiProcesses
from ops.harness.farm import private_redis
from ops.harness.program import Figure, benchmark
from ops.local.server_binary import packaged_server

SCRIPT_MS = 5.0
FIRST_S = 3.0
ENTRY_S = 5e-6
SHARE = 25.0
"""Of the server's thread, for all agents or all API processes, in percent."""
CONTROL_MS = 1.5
TURNS = 15


@benchmark
def scale(
    entries: Annotated[int, int, "Entries in the logs of what runs."] = 1_000_000,
    running: Annotated[int, int, "Requests that they belong to."] = 100,
    waiting: Annotated[int, int, "Requests that wait."] = 100_000,
    tenants: Annotated[int, int] = 1_000,
    models: Annotated[int, int] = 200,
    agents: Annotated[int, int] = 100,
    apis: Annotated[int, int] = 50,
    calls: Annotated[int, int, "Of a script; fewer of those that need much preparation."] = 2_000,
) -> list[Figure]:
    """Fill a private server as a large farm does, time each script by the server's own clock, and let a leader die.

    Everything but Redis is simulated, by the calls that real processes make. The successor's adoption, reading and
    lock are the real leader's; its prefill is not counted.
    """
    size = Size(entries, running, waiting, tenants, models, agents, apis)
    with (
        private_redis(packaged_server()) as (_, url),
        closing(connect(url)) as client,
        closing(connect_blocking(url)) as blocking,
        closing(connect(url)) as heartbeat,
    ):
        sent_by(client)  # a server that does not tell is refused before it is filled
        lease = fill(client, size)
        return [
            *_scripts(client, lease, size, calls),
            *_of_processes(client, url, size),
            *_of_a_death((client, blocking, heartbeat), lease, size),
        ]


def _scripts(client: SyncRedis, lease: Lease, size: Size, calls: int) -> list[Figure]:
    """Each script, after a control that shows what this machine adds to any call."""
    clock = ServerClock(client)
    figures = list[Figure]()
    click.echo(head())
    loop = control_loop(clock, CONTROL_MS)
    clock.times_ms.clear()
    for _ in range(calls):
        clock.run(loop)
    click.echo(row("control: a loop without keys", clock.times_ms))
    acts = Acts(client, clock, lease, size).by_name()
    for name, (act, part) in acts.items():
        figures += timed(clock, name, act, max(5, calls // part), SCRIPT_MS)
    clock.close()
    return figures


def _of_processes(client: SyncRedis, url: str, size: Size) -> list[Figure]:
    """Agents and API processes, by what they do whether there are requests or not."""
    with Agents(client, url, size) as agents:
        seconds = ApiProcesses(client, agents, size).rounds()
        ticks = agents.ticks()
        tick_s = agents.tick_s
        turns = agents.turns(TURNS)
        agents.unsettle()
        unsettled = agents.turns(TURNS // 3)
    figures = [
        figure_of("an api process's second, a command", seconds, SCRIPT_MS),
        figure_of("an agent's tick, a command", ticks, SCRIPT_MS),
        figure_of("a placement turn, a command", turns, SCRIPT_MS),
        figure_of("an unsettled turn, a command", unsettled, SCRIPT_MS),
    ]
    tick = _each("an agent's tick", ticks, size.agents / len(ticks))
    turn = _each("a placement turn", turns, 1)
    _each("an unsettled placement turn", unsettled, 1)
    first = _each("the second of the api process that acts for all", seconds[:1], 1)
    others = sum(second.thread for second in seconds[1:])
    if others:
        _each("the second of each other api process", seconds[1:], 1)
    return [
        *figures,
        Figure(f"thread's share of {size.agents} agents", (size.agents * tick + turn) / tick_s / 10, SHARE, "%"),
        Figure(f"thread's share of {size.apis} api processes", (first + others) / 10, SHARE, "%"),
    ]


def _each(name: str, rounds: Sequence[Round], parts: float) -> float:
    """Print the cost of one part of a round; returns the milliseconds of the server's thread."""
    thread = mean(round_.thread for round_ in rounds) / parts
    wall = mean(round_.wall for round_ in rounds) / parts
    commands = sum(round_.commands for round_ in rounds) / len(rounds) / parts
    longest = max(round_.wall for round_ in rounds) / parts
    click.echo(
        f"{name}: {commands:.0f} commands, {thread:.2f} ms of the server's thread, {wall:.0f} ms in all "
        f"(longest {longest:.0f})"
    )
    return thread


def _of_a_death(clients: tuple[SyncRedis, SyncRedis, SyncRedis], lease: Lease, size: Size) -> list[Figure]:
    recovery = succeed(clients, lease)
    total = recovery.entries
    click.echo(
        f"the successor read {total:,} entries of {len(recovery.ready)} requests: "
        f"{1e6 * recovery.ready[-1] / total:.2f} us each"
    )
    return [
        Figure("entries that the successor did not read", size.running - len(recovery.ready), 0),
        Figure("first request ready for its prefill", recovery.ready[0], FIRST_S, "s"),
        Figure("last request ready for its prefill", recovery.ready[-1], ENTRY_S * total, "s"),
        Figure("looks at which the lock was not held", recovery.lapses, 0),
    ]
