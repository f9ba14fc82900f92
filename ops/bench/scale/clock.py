"""The server's own clock: how long its thread worked on a call, or on all that a process sends in one of its rounds,
whatever else the machine did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import click

from control.errors import SettingsError
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Steps, read, run
from control.scripts import SCRIPTS
from ops.harness.program import Figure, percentile, table_row

T = TypeVar("T")
Act = Callable[[int], object]
"""Makes one call, or a few of one kind, with arguments that differ from index to index."""

ALONE = 20
"""Repeats of an act of which a call was too slow."""
_LOOP = "local x = 0 for i = 1, tonumber(ARGV[1]) do x = (x + i) % 7 end return x"
_TRIAL_TURNS = 20_000
_MOST = 50_000
"""Commands of one round."""
_SCRIPT_NAMES = {script.sha: name for name, script in SCRIPTS.items()}


class ServerClock:
    """Runs calls one at a time and notes in `times_ms` how long each took.

    The lower of two bounds counts. One is how long the server's main thread worked meanwhile: it includes chores, such
    as the fork that rewrites the append-only file. The other is the slow log's: it includes waits for a busy processor.
    """

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        client.config_set("slowlog-log-slower-than", 0)
        self.times_ms: list[float] = []

    def run(self, call: Call[T]) -> T:
        before = thread_ms(self._client)
        answer = run(self._client, call)
        worked = thread_ms(self._client) - before
        self.times_ms.append(min(worked, self._logged()))
        return answer

    def run_steps(self, steps: Steps[T]) -> T:
        """Each call of them is measured by itself."""
        try:
            step = next(steps)
            while True:
                if isinstance(step, Call):
                    step = steps.send(self.run(step))
                else:
                    step = steps.send(None if step is None else [self.run(call) for call in step])
        except StopIteration as end:
            return end.value

    def _logged(self) -> float:
        """The last command but the INFO after it."""
        return self._client.slowlog_get(2)[1]["duration"] / 1000

    def close(self) -> None:
        """Log no more."""
        self._client.config_set("slowlog-log-slower-than", -1)


def thread_ms(client: SyncRedis) -> float:
    """The processor time that the server's main thread has used so far."""
    used = client.info("cpu")
    return 1000 * (used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])


def control_loop(clock: ServerClock, ms: float) -> Call[int]:
    """A loop of about `ms` in the server that touches no key: what it takes beyond that is the machine's doing."""
    clock.times_ms.clear()
    for _ in range(20):
        clock.run(_loop(_TRIAL_TURNS))
    return _loop(max(1, int(_TRIAL_TURNS * ms / max(1e-3, min(clock.times_ms)))))


def _loop(turns: int) -> Call[int]:
    return read("EVAL", _LOOP, 0, turns, parse=int)


# --- acts -------------------------------------------------------------------------------------------------------------


def head() -> str:
    """The line above rows."""
    return table_row("server time, ms", ("p50", "p99.9", "worst", "calls"), 48, 8)


def row(name: str, milliseconds: Sequence[float]) -> str:
    """One line of the table: p50, p99.9 and worst time of the calls in ms, and their number."""
    values = median(milliseconds), percentile(sorted(milliseconds), 99.9), max(milliseconds)
    return table_row(name, [*(f"{value:.2f}" for value in values), len(milliseconds)], 48, 8)


def timed(clock: ServerClock, name: str, act: Act, times: int, limit: float) -> list[Figure]:
    """The p99.9 of the act's calls. Where one was beyond the limit the act is repeated alone, and their median counts
    too: it tells a script that is slow now and then from a machine that pauses."""
    clock.times_ms.clear()
    for index in range(times):
        act(index)
    milliseconds = list(clock.times_ms)
    click.echo(row(name, milliseconds))
    figures = [Figure(f"{name}, p99.9", percentile(sorted(milliseconds), 99.9), limit, "ms")]
    if max(milliseconds) > limit:
        clock.times_ms.clear()
        for index in range(times, times + ALONE):
            act(index)
        alone = list(clock.times_ms)
        click.echo(
            f"  worst {max(milliseconds):.2f} ms; repeated alone: median {median(alone):.2f}, worst {max(alone):.2f} ms"
        )
        figures.append(Figure(f"{name}, alone, p50", median(alone), limit, "ms"))
    return figures


# --- rounds -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """`commands` were sent. `logged`: how long each of them, and each that a script ran, took by the slow log, in ms,
    with its name. `thread` and `wall` in ms."""

    commands: int
    logged: list[tuple[float, str]]
    thread: float
    wall: float


def watch(client: SyncRedis, act: Callable[[], object]) -> Round:
    """Call `act`, and read what the server logged meanwhile. Nothing else may use the server."""
    client.config_set("slowlog-max-len", _MOST)
    client.config_set("slowlog-log-slower-than", 0)
    client.slowlog_reset()
    sent = sent_by(client)
    before = thread_ms(client)
    began = time.perf_counter()
    act()
    wall = 1000 * (time.perf_counter() - began)
    worked, sent = thread_ms(client) - before, sent_by(client) - sent - 3
    client.config_set("slowlog-log-slower-than", -1)
    logged = client.slowlog_get(_MOST)
    client.slowlog_reset()
    entries = [(entry["duration"] / 1000, _name(entry["command"])) for entry in logged]
    own = ("INFO", "SLOWLOG", "CONFIG", "CLIENT")
    return Round(sent, [entry for entry in entries if entry[1] not in own], worked, wall)


def sent_by(client: SyncRedis) -> int:
    """Commands that this connection has sent, those inside scripts not counted. Raises SettingsError."""
    count = client.client_info().get("tot-cmds")
    if count is None:
        raise SettingsError(
            "this server does not count a connection's commands: unset FURROW_REDIS_SERVER, or let it name a Valkey of "
            "8.1 or a Redis of 8.2, or later"
        )
    return int(count)


def figure_of(name: str, rounds: Sequence[Round], limit: float) -> Figure:
    """The figure of the commands of these rounds at p99.9, after a line that names the slowest.

    The log has the commands inside scripts too, each with a shorter time than its script: what is left out are only the
    shortest times.
    """
    logged = sorted((entry for round_ in rounds for entry in round_.logged), reverse=True)[
        : sum(round_.commands for round_ in rounds)
    ]
    milliseconds = [ms for ms, _ in logged]
    click.echo(f"{row(name, milliseconds)}  slowest: {logged[0][1]}")
    return Figure(f"{name}, p99.9", percentile(sorted(milliseconds), 99.9), limit, "ms")


def _name(command: bytes | str) -> str:
    text = command.decode(errors="replace") if isinstance(command, bytes) else command
    word, _, rest = text.partition(" ")
    return _SCRIPT_NAMES.get(rest.partition(" ")[0], "a script") if word == "EVALSHA" else word.upper()
