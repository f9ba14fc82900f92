"""`furrow bench scale`: what the control plane takes at real size, without any model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import click

from control import requests
from control.clients import SyncRedis
from control.connection import connect, connect_blocking, run, run_steps
from control.embedded import EmbeddedServer
from control.lease import Lease
from control.messages import LogEntry
from control.requests import Emission
from ops.bench.figures import Figure, conclude
from ops.bench.machine import describe
from ops.bench.scaling.crowd import MODEL, Size, fill, waiting
from ops.bench.scaling.takeover import succeed

SCRIPT_MS = 5.0
FIRST_S = 3.0
ENTRY_S = 5e-6
ROWS = 64
"""Requests whose tokens one emit brings."""


@click.command()
@click.option("--entries", default=1_000_000, show_default=True, help="Entries in the logs of what runs.")
@click.option("--running", default=64, show_default=True, help="Requests that they belong to.")
@click.option("--waiting", "queued", default=100_000, show_default=True, help="Requests that wait.")
@click.option("--tenants", default=1_000, show_default=True)
@click.option("--models", default=200, show_default=True)
@click.option("--calls", default=2_000, show_default=True, help="Of each script that is measured.")
def scale(entries: int, running: int, queued: int, tenants: int, models: int, calls: int) -> None:
    """Fill a private server as a large farm does, time each script at the server, and let a leader die.

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
        figures = [timed(client, name, call, calls) for name, call in acts(client, lease, size).items()]
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


def timed(client: SyncRedis, name: str, call: Callable[[int], object], calls: int) -> Figure:
    """The server's time for `calls` of them at p99.9, in ms, by its own slow log. A slow one is repeated alone."""
    client.config_set("slowlog-max-len", 200_000)
    client.config_set("slowlog-log-slower-than", 0)
    spent: list[float] = []
    for start in range(0, calls, 500):
        client.slowlog_reset()
        for index in range(start, min(calls, start + 500)):
            call(index)
        spent += _script_ms(client)
    worst = max(spent)
    p999 = sorted(spent)[min(len(spent) - 1, int(0.999 * len(spent)))]
    if worst > SCRIPT_MS:
        client.slowlog_reset()
        for index in range(calls, calls + 5):
            call(index)
        alone = max(_script_ms(client))
        click.echo(f"{name}: worst {worst:.2f} ms; repeated alone {alone:.2f} ms")
        p999 = max(p999, alone)
    client.config_set("slowlog-log-slower-than", -1)
    return Figure(f"{name}, p99.9 at the server", p999, SCRIPT_MS, "ms")


def _script_ms(client: SyncRedis) -> list[float]:
    return [
        one["duration"] / 1000
        for one in client.slowlog_get(200_000)
        if bytes(one["command"]).split(b" ", 1)[0] in (b"EVALSHA", b"EVAL", b"XRANGE")
    ]


def acts(client: SyncRedis, lease: Lease, size: Size) -> dict[str, Callable[[int], object]]:
    """Each script with arguments that differ from call to call."""
    seqs = {one.rid: one.seq for one in _held(client, lease)}

    def emit(_: int) -> object:
        rows = [Emission(rid, seq + 1, [LogEntry(seq + 1, 0, 7)]) for rid, seq in list(seqs.items())[:ROWS]]
        for row in rows:
            seqs[row.rid] = row.seq
        return run(client, requests.emit(lease, rows))

    def enqueue(index: int) -> object:
        return run(client, requests.enqueue(waiting(size.waiting + index, size)))

    def put_back(index: int) -> object:
        claims = run(client, requests.claim(lease, 64, requests.ANY_TOKENS)).requests
        for one in claims:
            run(client, requests.requeue(lease, one.rid))
        return claims

    def read(index: int) -> object:
        return run(client, requests.read_log(MODEL, f"logged-{index % size.running}", index))

    def follow(index: int) -> object:
        return run(client, requests.follow(MODEL, f"logged-{index % size.running}", "api-1", _tenant(index), index))

    def _tenant(index: int) -> str:
        return f"tenant-{index % size.running}"

    def stage(index: int) -> object:
        log = [LogEntry(seq, 0, 7) for seq in range(1, 501)]
        return run_steps(client, requests.enqueue_again(_again(index, size), log))

    def cancel(index: int) -> object:
        rid = size.waiting - 1 - index
        return run(client, requests.cancel(MODEL, f"waiting-{rid}", f"tenant-{rid % size.tenants}"))

    return {
        "enqueue": enqueue,
        "emit of 64 rows": emit,
        "follow and a page": follow,
        "a page of a log": read,
        "cancel of what waits": cancel,
        "adoption's batch": lambda _: run(client, requests.adopt(lease)),
        "claim of 64, each put back": lambda index: put_back(index) if index % 100 == 0 else None,
        "a staged page and its request": lambda index: stage(index) if index % 20 == 0 else None,
        "a batch of a gone api process": lambda index: (
            run(client, requests.reap(MODEL, [f"api-{2 + index % 40}"])) if index % 20 == 0 else None
        ),
    }


def _again(index: int, size: Size) -> requests.Enqueue:
    return waiting(10_000_000 + index, size)


def _held(client: SyncRedis, lease: Lease) -> list[requests.Claimed]:
    found, after, more = list[requests.Claimed](), "", True
    while more:
        batch = run(client, requests.adopt(lease, after))
        found += batch.requests
        after, more = batch.after, batch.more
    return found
