"""`python -m ops.bench.fanout.leaders`: the leaders of a measurement, until SIGTERM; then what they did, as JSON."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from control import requests
from control.process import die_with_parent
from control.redis.connection import connect, connect_blocking, run
from control.replicas.commands import wait_for_work
from control.settings import Settings
from ops.bench.fanout.replica import Replica, publish
from ops.bench.fanout.ring import TOKENS, Ring
from ops.bench.fanout.schedule import Load
from ops.bench.fanout.scripted_leader import ScriptedLeader

_BLOCK_MS = 200


@click.command()
@click.option("--ring", "path", required=True, type=click.Path(path_type=Path))
@click.option("--load", "load_json", required=True)
@click.option("--whole", is_flag=True, help="One replica that answers each request with all of its tokens at once.")
def main(path: Path, load_json: str, whole: bool) -> None:
    """Lead on the Redis that the environment names."""
    die_with_parent()
    url = Settings.from_environment().redis_url
    load = msgspec.json.decode(load_json, type=Load)
    stopped = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    client = connect(url)
    tokenizer, tokens = publish(client)
    names = ["r0"] if whole else [f"r{index}" for index in range(load.replicas)]
    ring = Ring(path, load.clients)
    replicas = [Replica(client, name, load, tokenizer, tokens, ring) for name in names]
    if whole:
        did = answer_whole(replicas[0], url, ring, lambda: stopped)
    else:
        did = step_in_turn(replicas, load, lambda: stopped)
    for replica in replicas:
        replica.leave()
    client.close()
    click.echo(msgspec.json.encode(did))


def step_in_turn(replicas: Sequence[ScriptedLeader], load: Load, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Every replica's steps at their moments. `late_ms` is the worst delay of one: this process or Redis was busy."""
    tokens, worst, began = 0, 0.0, time.monotonic()
    for replica, late in load.ticks():
        if stopped() and not any(one.running for one in replicas):
            break
        tokens += replicas[replica].turn()
        for other in replicas:  # slow ones keep their locks between their steps
            other.tend()
        worst = max(worst, late)
    return {"tokens": tokens, "late_ms": 1000 * worst, "seconds": time.monotonic() - began}


def answer_whole(replica: Replica, url: str, ring: Ring, stopped: Callable[[], bool]) -> dict[str, Any]:
    """Each request's answer in one step; the ring tells how many seconds its leader had it."""
    client, blocking, answered, bell = connect(url), connect_blocking(url), 0, "0"
    while not stopped():
        replica.tend()
        claims = run(client, requests.claim(replica.lease, 64, requests.ANY_TOKENS))
        had_at, bell = time.monotonic(), claims.bell
        replica.take(claims)
        for request in replica.running.values():
            while request.live:
                replica.speak(request)
            ring.times[replica.numbers[request.rid] * TOKENS] = time.monotonic() - had_at
            run(client, requests.emit(replica.lease, [request.emission(most=len(request.history))]))
            answered += 1
        replica.running.clear()
        if not claims.requests:
            wait_for_work(blocking, replica.lease, bell, _BLOCK_MS)
    return {"answered": answered}


if __name__ == "__main__":
    main()
