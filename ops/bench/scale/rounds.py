"""All that a process sends in one of its rounds: each command by the slow log, and the server's thread in all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click

from control.errors import SettingsError
from control.redis.clients import SyncRedis
from control.scripts import SCRIPTS
from ops.bench.common.figures import Figure
from ops.bench.scale.clock import thread_ms
from ops.bench.scale.timing import percentile, row

_MOST = 50_000
"""Commands of one round."""
_SCRIPT_NAMES = {script.sha: name for name, script in SCRIPTS.items()}


@dataclass(frozen=True)
class Round:
    """`commands` were sent. `logged`: how long each of them, and each that a script ran, took by the slow log, in ms,
    with its name. `thread` and `wall` in ms."""

    commands: int
    logged: list[tuple[float, str]]
    thread: float
    wall: float


def watch(client: SyncRedis, act: Callable[[], object]) -> Round:
    """Do it, and read what the server logged meanwhile. Nothing else may use the server."""
    client.config_set("slowlog-max-len", _MOST)
    client.config_set("slowlog-log-slower-than", 0)
    client.slowlog_reset()
    sent, before, began = sent_by(client), thread_ms(client), time.perf_counter()
    act()
    wall = 1000 * (time.perf_counter() - began)
    worked, sent = thread_ms(client) - before, sent_by(client) - sent - 3
    client.config_set("slowlog-log-slower-than", -1)
    logged = client.slowlog_get(_MOST)
    client.slowlog_reset()
    found = [(one["duration"] / 1000, _name(one["command"])) for one in logged]
    own = ("INFO", "SLOWLOG", "CONFIG", "CLIENT")
    return Round(sent, [one for one in found if one[1] not in own], worked, wall)


def sent_by(client: SyncRedis) -> int:
    """Commands that this connection has sent, those inside scripts not counted. Raises SettingsError."""
    count = client.client_info().get("tot-cmds")
    if count is None:
        raise SettingsError(
            "this server does not count a connection's commands: unset FURROW_REDIS_SERVER, or let it name a Valkey of "
            "8.1 or a Redis of 8.2, or later"
        )
    return int(count)


def told(name: str, rounds: Sequence[Round], limit: float) -> Figure:
    """The figure of the commands of these rounds at p99.9, after a line that names the slowest.

    The log has the commands inside scripts too, each with a shorter time than its script: what is left out are only the
    shortest times.
    """
    logged = sorted((one for each in rounds for one in each.logged), reverse=True)[
        : sum(one.commands for one in rounds)
    ]
    spent = [ms for ms, _ in logged]
    click.echo(f"{row(name, spent)}  slowest: {logged[0][1]}")
    return Figure(f"{name}, p99.9", percentile(spent, 0.999), limit, "ms")


def _name(command: bytes | str) -> str:
    text = command.decode(errors="replace") if isinstance(command, bytes) else command
    word, _, rest = text.partition(" ")
    return _SCRIPT_NAMES.get(rest.partition(" ")[0], "a script") if word == "EVALSHA" else word.upper()
