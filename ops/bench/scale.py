"""`furrow bench scale`: what the control plane takes at real size, without any model."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

import click

from control.connection import connect, connect_blocking
from control.embedded import EmbeddedServer
from ops.bench.figures import Figure, conclude
from ops.bench.machine import describe
from ops.bench.scaling.acts import Act, Acts
from ops.bench.scaling.clock import ServerClock
from ops.bench.scaling.crowd import Size, fill
from ops.bench.scaling.takeover import succeed

SCRIPT_MS = 5.0
FIRST_S = 3.0
ENTRY_S = 5e-6


@click.command()
@click.option("--entries", default=1_000_000, show_default=True, help="Entries in the logs of what runs.")
@click.option("--running", default=100, show_default=True, help="Requests that they belong to.")
@click.option("--waiting", "queued", default=100_000, show_default=True, help="Requests that wait.")
@click.option("--tenants", default=1_000, show_default=True)
@click.option("--models", default=200, show_default=True)
@click.option("--calls", default=2_000, show_default=True, help="Of each script that is measured.")
def scale(entries: int, running: int, queued: int, tenants: int, models: int, calls: int) -> None:
    """Fill a private server as a large farm does, time each script by the server's own clock, and let a leader die.

    Everything but Redis is simulated, by the calls that real processes make. The successor's adoption, reading and
    lock are the real leader's; its prefill is not counted.
    """
    click.echo(describe())
    size = Size(entries, running, queued, tenants, models)
    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedServer(Path(folder) / "redis") as url,
        closing(connect(url)) as client,
        closing(connect_blocking(url)) as blocking,
        closing(connect(url)) as pulse,
    ):
        lease = fill(client, size)
        clock = ServerClock(client)
        acts = Acts(client, clock, lease, size).named()
        figures = [timed(clock, name, act, max(5, calls // part)) for name, (act, part) in acts.items()]
        clock.close()
        found = succeed((client, blocking, pulse), lease)
    total = found.entries
    click.echo(
        f"the successor read {total:,} entries of {len(found.ready)} requests: {1e6 * found.last / total:.2f} us each"
    )
    conclude(
        [
            *figures,
            Figure("entries that the successor did not read", size.running - len(found.ready), 0),
            Figure("first request ready for its prefill", found.first, FIRST_S, "s"),
            Figure("last request ready for its prefill", found.last, ENTRY_S * total, "s"),
            Figure("looks at which the lock was not held", found.lapses, 0),
        ]
    )


def timed(clock: ServerClock, name: str, act: Act, calls: int) -> Figure:
    """The server's time for a call at p99.9, in ms. Where one was too slow, the act is repeated alone."""
    clock.spent.clear()
    for index in range(calls):
        act(index)
    spent = sorted(clock.spent)
    p999 = spent[min(len(spent) - 1, int(0.999 * len(spent)))]
    if spent[-1] > SCRIPT_MS:
        clock.spent.clear()
        for index in range(calls, calls + 5):
            act(index)
        click.echo(f"{name}: worst {spent[-1]:.2f} ms; repeated alone {max(clock.spent):.2f} ms")
        p999 = max(p999, *clock.spent)
    return Figure(f"{name}, p99.9", p999, SCRIPT_MS, "ms")
