"""`furrow bench hostile`: the delay of other clients and the memory of an API process under attack.

A row is an attack of one key beside another tenant's chats. The attacker, the other tenant, /health and the leaders are
processes of their own (`crowd`, `neighbour`, `leaders`), on the cores that the API process does not have. In a control
the API process has one mechanism switched off.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import click

from control.errors import FurrowError
from control.redis.clients import SyncRedis
from control.redis.connection import connect, run
from control.replicas.model_overviews import load_of
from ops.bench.fanout.fanout import api, wait_for_end, wait_for_model
from ops.bench.fanout.leaders import MODEL
from ops.bench.hostile import attacks
from ops.bench.hostile.attacks import ApiTarget
from ops.bench.hostile.crowd import Deeds, attack
from ops.bench.hostile.leaders import HOSTILE_MODELS, WAITING, Claim, lead_noting
from ops.bench.hostile.neighbour import NeighbourReport, ask_and_probe
from ops.common.sabotage import Sabotage
from ops.common.waiting import until
from ops.harness import program
from ops.harness.client import CHAT
from ops.harness.exchange import Address
from ops.harness.farm import private_redis, say
from ops.harness.processes import Meter, Process, calling, split_cores
from ops.harness.program import Figure, Summary, figures_table, percentile, summarise

BEYOND_MS = 500.0
"""p99 of the other tenant's first tokens, beyond the p50 of a quiet time."""
FIRST_MS = 2000.0
HEALTH_MS = 100.0
GAP_MS = 100.0
"""Between two tokens of the other tenant, beside a model whose files are hostile."""
GONE_PERCENT = 2.0
ADMISSION_MS = 1.0
WAITING_PERCENT = 2.0

QUIET_S = 10.0
ADMITTED = 400
"""Chats of the burst that is timed for the cost of an admission."""
SETTLED_S = 0.3
READY_WITHIN_S = 60.0
NUMBERS = 10_000_000
"""Request numbers of one row; the other tenant's are the upper half."""
MODEL_FILES = "model-files"


@dataclass(frozen=True, slots=True)
class AttackRow:
    """An attack of `connections` connections for so many seconds (from the moment at which all wait, where they do)."""

    attack: str
    connections: int
    seconds: float
    models: tuple[str, ...] = (MODEL,)
    """Requests go to these by turns."""

    @property
    def name(self) -> str:
        return MODEL_FILES if self.models == HOSTILE_MODELS else f"{self.attack}-{self.connections}"


ROWS = {
    row.name: row
    for row in (
        AttackRow("cut", 8, 30.0),
        AttackRow("cut", 32, 30.0),
        AttackRow("cut", 256, 30.0),
        AttackRow("burst", 400, 15.0),
        AttackRow("burst", 1600, 15.0),
        AttackRow("burst", 3200, 20.0),
        AttackRow("loop", 512, 20.0),
        AttackRow("wait", 4000, 20.0, (WAITING,)),
        AttackRow("loop", 4, 20.0, HOSTILE_MODELS),
    )
}
ADMISSION = "admission"
STARVED = "API without its core"
"""The share of time in which the API process could have run, and other processes had its core: 0 on a quiet machine."""
NAMES = (ADMISSION, *ROWS)


@dataclass
class AttackResult:
    """The figures of a row. `began` and `ended` are times of the monotonic clock, `shares` are of one core."""

    row: AttackRow
    report: NeighbourReport
    deeds: Deeds
    shares: dict[str, float]
    began: float
    ended: float
    alive: bool = True
    """True if the API process outlived the row."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A burst of short chats that wait in the queue: how many were queued, and milliseconds of processor for each."""

    sent: int
    queued: int
    each_ms: float


@dataclass
class HostileResults:
    """All that was measured."""

    quiet: Summary | None = None
    """Milliseconds to the other tenant's first token without an attack."""
    quiet_share: float = 0.0
    """Of a core, which the API process takes for the other tenant and /health alone."""
    admission: Admission | None = None
    rows: list[AttackResult] = field(default_factory=list[AttackResult])
    claims: list[Claim] = field(default_factory=list[Claim])


def measure(
    own: set[int],
    others: set[int],
    names: Collection[str],
    seconds: float | None,
    control: Sabotage | None = None,
) -> HostileResults:
    """Run the rows of these names on a private farm, whose API process is changed by `control`; `seconds` replaces the
    time of each."""
    outcome = HostileResults()
    with (
        private_redis() as (folder, url),
        api(own, url, environment=control.write(folder / "control") if control else {}) as (part, address),
        calling(others, lead_noting, redis_url=url) as leading,
        connect(url) as client,
    ):
        for model in (MODEL, WAITING, *HOSTILE_MODELS):
            wait_for_model(address, model)
        farm = _Farm(others, part, leading, address, client)
        if ADMISSION in names:
            outcome.admission = farm.admission()
            click.echo(admission_line(outcome.admission))
        rows = [row for name, row in ROWS.items() if name in names]
        if rows:
            say(f"the other tenant alone, for {min(QUIET_S, seconds or QUIET_S):g} s")
            report, shares = farm.quiet(min(QUIET_S, seconds or QUIET_S))
            outcome.quiet, outcome.quiet_share = summarise(report.first_ms), shares["api"]
            click.echo(quiet_line(report, shares))
        for row in rows:
            measured = farm.run(row, seconds or row.seconds)
            outcome.rows.append(measured)
            click.echo(row_line(measured))
            if not measured.alive:
                break
        outcome.claims = leading.stop(list[Claim])
    return outcome


class _Farm:
    """Runs rows against one API process."""

    def __init__(self, others: set[int], part: Process, leading: Process, address: Address, client: SyncRedis) -> None:
        self._others = others
        self._address = address
        self._client = client
        self._leading = leading
        self._api = part
        self._pids = {"api": part.pid, "leaders": leading.pid, "redis": int(client.info("server")["process_id"])}
        self._attacker, self._other = (attacks.new_key(client, name) for name in ("attacker", "other"))
        self._first = 0

    def quiet(self, seconds: float) -> tuple[NeighbourReport, dict[str, float]]:
        with self._neighbour(seconds) as neighbour:
            shares = self._shares(neighbour, {})
            return neighbour.result(NeighbourReport), shares

    def run(self, row: AttackRow, seconds: float) -> AttackResult:
        """The attack ends when the time is over; the answers that the other tenant then still lacks are waited for."""
        if row.name == MODEL_FILES:
            until(self._tokenizer_is_tried, "the tokenizer of the model with a hostile one is tried")
        say(f"{row.name}: for {seconds:g} s")
        with self._crowd(row.attack, row.models, row.connections) as crowd:
            if row.attack == "wait":
                crowd.process.send_signal(signal.SIGUSR1)
                crowd.await_line("waiting")
            with self._neighbour(seconds) as neighbour:
                began = time.monotonic()
                if row.attack != "wait":
                    crowd.process.send_signal(signal.SIGUSR1)
                shares = self._shares(neighbour, {"attacker": crowd.pid})
                ended = time.monotonic()
                deeds = crowd.stop(Deeds)
                report = neighbour.result(NeighbourReport)
        alive = self._api.process.poll() is None
        if alive:
            wait_for_end(self._address)
        if self._leading.process.poll() is not None:
            raise RuntimeError(f"{row.name}: the leaders ended with status {self._leading.process.returncode}")
        return AttackResult(row, report, deeds, shares, began, ended, alive)

    def _tokenizer_is_tried(self) -> bool:
        """Until then requests of its model get 503."""
        body = {"model": HOSTILE_MODELS[1], "messages": [{"role": "user", "content": "stream 0"}]}
        target = ApiTarget(self._address, self._attacker, 0)
        return target.post(CHAT, body, f"authorization: Bearer {self._attacker}") == 422

    def admission(self) -> Admission:
        """Send a burst that waits, and read the API's processor time once every chat is queued or refused."""
        say(f"{ADMISSION}: {ADMITTED} chats that wait")
        api_pid = {"api": self._pids["api"]}
        with self._crowd("burst", (WAITING,), ADMITTED) as crowd:
            before = self._enqueued()
            meter = Meter(api_pid)
            crowd.process.send_signal(signal.SIGUSR1)
            until(lambda: self._enqueued() > before, "a chat is queued")
            queued = 0
            since = time.monotonic()
            while queued < ADMITTED and time.monotonic() - since < SETTLED_S:  # ends early where some are refused
                if (now := self._enqueued() - before) > queued:
                    queued = now
                    since = time.monotonic()
                time.sleep(0.01)
            processor_s = meter.processor_s()["api"]
            crowd.stop(Deeds)
        wait_for_end(self._address)
        return Admission(ADMITTED, queued, 1000 * processor_s / queued)

    def _enqueued(self) -> int:
        return run(self._client, load_of(WAITING)).enqueued

    def _shares(self, neighbour: Process, attacker: dict[str, int]) -> dict[str, float]:
        """The share of a core that each process takes, until the other tenant has sent all."""
        meter = Meter({**self._pids, "other tenant": neighbour.pid, **attacker})
        began = time.monotonic()
        waited = _waited_s(self._pids["api"])
        neighbour.await_line("sent")
        starved = (_waited_s(self._pids["api"]) - waited) / (time.monotonic() - began)
        return {**meter.shares(), STARVED: starved}

    @contextmanager
    def _neighbour(self, seconds: float) -> Generator[Process]:
        asking = {"address": self._address, "key": self._other, "model": MODEL, "seconds": seconds}
        with calling(self._others, ask_and_probe, first=self._first + NUMBERS // 2, **asking) as neighbour:
            neighbour.await_line("begin")
            yield neighbour

    @contextmanager
    def _crowd(self, kind: str, models: Sequence[str], connections: int) -> Generator[Process]:
        self._first += NUMBERS
        attacking = {"address": self._address, "key": self._attacker, "models": models, "kind": kind}
        with calling(self._others, attack, connections=connections, first=self._first, **attacking) as crowd:
            crowd.await_line("ready")
            yield crowd


def _waited_s(pid: int) -> float:
    """Seconds in which the main thread of a process was ready to run and had no core; 0 without such a count."""
    schedstat = Path(f"/proc/{pid}/schedstat")
    return int(schedstat.read_text().split()[1]) / 1e9 if schedstat.exists() else 0.0


def gone_percent(claims: Sequence[Claim], measured: AttackResult) -> float:
    """Of the steps that leaders did for requests claimed in a row's time: those of requests whose client had gone
    before the claim."""
    inside = [claim for claim in claims if measured.began <= claim.at <= measured.ended]
    cut_at = measured.deeds.cut_at
    steps = sum(claim.steps for claim in inside if cut_at.get(claim.number, float("inf")) < claim.at)
    return 100 * steps / max(1, sum(claim.steps for claim in inside))


def figures(outcome: HostileResults) -> list[Figure]:
    """The figures with limits."""
    judged = list[Figure]()
    if outcome.admission is not None:
        name = f"{ADMISSION}: processor time of the API for a chat"
        judged.append(Figure(name, outcome.admission.each_ms, ADMISSION_MS, "ms"))
    for measured in outcome.rows:
        assert outcome.quiet is not None
        judged += _of_row(measured, outcome.quiet, outcome.quiet_share, outcome.claims)
    return judged


def _of_row(measured: AttackResult, quiet: Summary, quiet_share: float, claims: Sequence[Claim]) -> list[Figure]:
    row = measured.row
    report = measured.report
    deeds = measured.deeds
    first = sorted(report.first_ms) or [math.inf]
    health = sorted(report.health_ms) or [math.inf]
    judged = [
        Figure("first token p99, beyond quiet p50", percentile(first, 99) - quiet.p50, BEYOND_MS, "ms"),
        Figure("first token, maximum", first[-1], FIRST_MS, "ms"),
        Figure("/health, maximum", health[-1], HEALTH_MS, "ms"),
        Figure("failed answers of the other tenant", len(report.failed), 0),
    ]
    if row.name == MODEL_FILES:
        gaps = sorted(report.gaps_ms) or [math.inf]
        judged.append(Figure("gap between tokens, maximum", gaps[-1], GAP_MS, "ms"))
        unnamed = sum(deeds.statuses.values()) - deeds.named
        judged.append(Figure("422 with the model's name", deeds.named, 1, at_least=True))
        judged.append(Figure("other answers", unnamed, 0))
        judged.append(Figure("ends of the API process", not measured.alive, 0))
    if row.attack == "cut":
        percent = gone_percent(claims, measured)
        judged.append(Figure("steps for clients that had gone", percent, GONE_PERCENT, "%"))
    if row.attack == "wait":
        share = 100 * (measured.shares["api"] - quiet_share)
        judged.append(Figure("share of a core for waiting streams", share, WAITING_PERCENT, "%"))
        # Those that were claimed meanwhile wait no more.
        judged.append(Figure("streams that waited to the end", deeds.waiting, 0.9 * row.connections, at_least=True))
    else:
        judged.append(Figure("requests of the attacker", deeds.sent, row.connections, at_least=True))
    return [replace(figure, name=f"{row.name}: {figure.name}") for figure in judged]


def admission_line(admission: Admission) -> str:
    return (
        f"{ADMISSION}: {admission.queued} of {admission.sent} chats queued, "
        f"{admission.each_ms:.2f} ms of the API's processor each"
    )


def quiet_line(report: NeighbourReport, shares: Mapping[str, float]) -> str:
    return f"quiet: {_times(report)}; of a core: {_percentages(shares)}"


def row_line(measured: AttackResult) -> str:
    deeds = measured.deeds
    statuses = ", ".join(f"{count} × {status or 'cut'}" for status, count in sorted(deeds.statuses.items()))
    parts = [f"{measured.row.name}: {_times(measured.report)}"]
    parts.append(f"attacker: {deeds.sent} requests" + (f" ({statuses})" if statuses else ""))
    if measured.row.attack == "burst":
        parts.append(f"{deeds.bursts} bursts")
    if deeds.comments_s:
        parts.append(
            f"{deeds.waiting} streams waited, {deeds.comment_bytes / deeds.comments_s:.0f} bytes/s of comments"
        )
    parts.append(f"of a core: {_percentages(measured.shares)}")
    return "; ".join(parts) + "".join(f"\n  failed: {text!r}" for text in measured.report.failed[:3])


def _times(report: NeighbourReport) -> str:
    rows = [("first token", report.first_ms), ("gap", report.gaps_ms), ("/health", report.health_ms)]
    rows.append(("own lateness", report.late_ms))
    times = [(name, summarise(values)) for name, values in rows if values]
    return ", ".join(f"{name} p50 {s.p50:.1f}, p99 {s.p99:.1f}, max {s.max:.1f} ms" for name, s in times)


def _percentages(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items())


# --- controls ---------------------------------------------------------------------------------------------------------


CONTROLS = {
    "no-turns": Sabotage(
        "all requests of the API process wait in one line, first come, first served",
        "api.http.middleware",
        """
in_turn = module.Admission.in_turn
module.Admission.in_turn = lambda admission, app, tenant_of: in_turn(admission, app, lambda scope: "")
""",
        ("burst-1600: first token p99, beyond quiet p50", "burst-1600: /health, maximum"),
    ),
    "no-leaving": Sabotage(
        "the API process does not ask whether a client is still there",
        "api.http.connection",
        """
module.Client.leave = lambda client: client.begin()
""",
        ("cut-32: steps for clients that had gone",),
    ),
    "no-confinement": Sabotage(
        "the API process renders all templates itself, without prices",
        "api.models.models",
        """
assert module._template("m", "", ()) is not None
module._template = lambda name, source, trusted: module.PlainTemplate(source)
""",
        ("model-files: gap between tokens, maximum", "model-files: /health, maximum"),
    ),
    "no-hesitation": Sabotage(
        "requests of a tenant whose clients leave at once are begun at once",
        "api.http.middleware",
        """
assert module.Departures.hesitation
module.Departures.hesitation = lambda departures, tenant: 0.0
""",
        ("cut-8: steps for clients that had gone",),
    ),
    "no-addresses": Sabotage(
        "connections of all addresses wait in one line",
        "api.http.connection",
        """
assert module.address_of
module.address_of = lambda peer: ""
""",
        ("burst-3200: /health, maximum",),
    ),
    "no-shared-look": Sabotage(
        "each waiting request is looked at by itself, twice a second",
        "api.generation.follow",
        """
assert module.PLACES > 1 and module._LONGEST_PATIENCE > 1
module.PLACES = module._LONGEST_PATIENCE = 1
module._LOOKS_A_TICK = 1_000_000
""",
        ("wait-4000: share of a core for waiting streams",),
    ),
}


class NotMissed(FurrowError):
    """A control did no harm."""


def rows_of(control: Sabotage) -> list[str]:
    """The rows whose figures must be missed."""
    return sorted({figure.partition(":")[0] for figure in control.kinds})


def judge(control: Sabotage, figures: Sequence[Figure]) -> None:
    """Print the table. Raises NotMissed where a figure holds that must be missed, or is not there."""
    click.echo(figures_table(figures))
    missed = {figure.name for figure in figures if not figure.holds}
    if harmless := [name for name in control.kinds if name not in missed]:
        raise NotMissed(
            f"{', '.join(harmless)}: not missed although {control.behaviour}; the row does not find such harm"
        )
    click.echo(f"as expected: {', '.join(control.kinds)}: missed, because {control.behaviour}")


# --- the command ------------------------------------------------------------------------------------------------------


ATTACKS = "attacks"
SECONDS = 15.0
"""Duration of each run of the attacks."""


@program.benchmark
def hostile(
    names: Annotated[
        tuple[str, ...], "--row", click.Choice([ATTACKS, *NAMES]), "Row to measure. Repeatable.  [default: all]"
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
        click.Choice(list(CONTROLS)),
        "Switch one mechanism of the API process off; figures of its rows must then miss their limits.",
    ] = None,
) -> program.Outcome:
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
        sabotage = CONTROLS[control]
        outcome = measure(own, others, rows_of(sabotage), seconds, sabotage)
        judge(sabotage, figures(outcome))
        return program.Outcome()
    judged = list[Figure]()
    if ATTACKS in names or not names:
        judged += attacks.measure(own, others, clients, seconds or SECONDS, runs)
    row_names = [name for name in NAMES if name in names or not names]
    if row_names:
        judged += figures(measure(own, others, row_names, seconds))
    return program.Outcome(judged)
