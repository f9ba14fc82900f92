"""`furrow bench load`: the scenarios against a farm that runs, or against one started for each of them.

Where a request's time went is told by the timestamps in its hash, and the client's own clock. The four beginnings and
`first token` are taken from three clocks (API, Redis, leader), and `deliver` from two: run the generator on a host
whose clock agrees with the farm's, or the report says that the clocks differ.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import click

from control.errors import FurrowError
from control.keys import ModelKeys
from control.operations.options import redis_option
from control.operations.spec import build_spec
from control.redis.clients import AsyncRedis
from control.redis.connection import arun_all, connect_async, read
from control.settings import redis_url_from_environment
from ops.demo import MODEL_DIR
from ops.harness.client import Answer, Base, ask, chat, now_ms, prompt, request
from ops.harness.farm import NOBODY_REFUSED, private_farm, say
from ops.harness.program import Figure, Outcome, Summary, benchmark, summarise, table_row


@dataclass(frozen=True, slots=True)
class Scenario:
    """`replicas` has one number per model; `prompt_bytes` is the length of each prompt's text. Every request is greedy;
    users and models take turns."""

    name: str
    replicas: tuple[int, ...]
    users: int
    requests: int
    concurrency: int
    max_tokens: int
    stream: bool = True
    prompt_bytes: int = 48

    @property
    def models(self) -> int:
        return len(self.replicas)

    def turn(self, index: int) -> tuple[int, int]:
        """Indices of the user and the model of request `index`. A user meets every model."""
        # Where the two turns fall into step, the models' turn is shifted by one each time round.
        return index % self.users, (index + index // math.lcm(self.users, self.models)) % self.models


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("1-streaming", (1,), users=1, requests=30, concurrency=5, max_tokens=64),
        Scenario("1-non-streaming", (1,), users=1, requests=20, concurrency=5, max_tokens=64, stream=False),
        Scenario("multi-model", (4, 3), users=5, requests=50, concurrency=10, max_tokens=64),
        Scenario("high-concurrency", (3,), users=10, requests=60, concurrency=20, max_tokens=32),
        Scenario("queue-saturation", (1,), users=10, requests=40, concurrency=15, max_tokens=32),
        Scenario("20-users", (3,), users=20, requests=60, concurrency=10, max_tokens=32),
        Scenario("scaling-1", (1,), users=5, requests=30, concurrency=10, max_tokens=32),
        Scenario("scaling-3", (3,), users=5, requests=30, concurrency=10, max_tokens=32),
        Scenario("scaling-5", (5,), users=5, requests=30, concurrency=10, max_tokens=32),
        Scenario("heavy", (3,), users=20, requests=100, concurrency=100, max_tokens=32, prompt_bytes=10_240),
    )
}


def scenarios_of(names: tuple[str, ...]) -> list[Scenario]:
    """The scenarios named, in that order; all of them for none. Raises UsageError for an unknown name."""
    for name in names:
        if name not in SCENARIOS:
            raise click.UsageError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names] or list(SCENARIOS.values())


# --- segments of a request --------------------------------------------------------------------------------------------

SEGMENTS: dict[str, tuple[str, str]] = {
    "parse": ("t_received", "t_enqueued"),  # read, validated, rendered, tokenised, enqueued
    "queue": ("t_enqueued", "t_claimed"),
    "claim": ("t_claimed", "t_prefill"),  # the step that was under way, and planning
    "prefill": ("t_prefill", "t_first"),
    "first token": ("t_received", "t_first"),  # the four above, together
    "decode": ("t_first", "t_last"),
    "publish": ("t_last", "t_delivered"),  # pub/sub, detokenising, writing
    "deliver": ("t_delivered", "client_end"),
}
"""Segment → the timestamps at which it begins and ends."""

STAMPS = tuple(dict.fromkeys(stamp for pair in SEGMENTS.values() for stamp in pair if stamp != "client_end"))
"""The fields of a request's hash that are read."""

SKEW_MS = 50.0
"""Stamps are whole ms of different processes: a little less than nothing is rounding, more is a wrong clock."""
EVERY_S = 0.2
PATIENCE_MS = 5_000.0
"""The API writes t_delivered after the client has its answer; later than this it is missing."""


class ClocksDiffer(Exception):
    """A segment ended before it began."""


def durations(stamps: Mapping[str, float]) -> dict[str, float]:
    """Segment → ms, for those whose two stamps are there. Raises ClocksDiffer."""
    milliseconds: dict[str, float] = {}
    for name, (begin, end) in SEGMENTS.items():
        if begin in stamps and end in stamps:
            took = stamps[end] - stamps[begin]
            if took < -SKEW_MS:
                raise ClocksDiffer(f"segment {name!r} took {took:.0f} ms: the clocks behind {begin} and {end} differ")
            milliseconds[name] = max(0.0, took)
    return milliseconds


class StampCollector:
    """Reads the stamps of ended requests once they are complete, in one round trip for all that wait: the hashes live
    only two minutes longer."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._waiting: list[Answer] = []
        self.stamps: dict[str, dict[str, float]] = {}
        """rid → stamp → ms, `client_end` included; incomplete where the hash stayed so."""

    def add(self, answer: Answer) -> None:
        self._waiting.append(answer)

    async def run(self, complete: asyncio.Event) -> None:
        """Collect until `complete` is set (no further answer will be added) and nothing waits."""
        while self._waiting or not complete.is_set():
            waiting, self._waiting = self._waiting, []
            calls = [
                read("HMGET", ModelKeys(answer.model).request(answer.rid), *STAMPS, parse=_stamps) for answer in waiting
            ]
            for answer, stamps in zip(waiting, await arun_all(self._client, calls), strict=True):
                if isinstance(stamps, Exception):
                    raise stamps
                if len(stamps) < len(STAMPS) and now_ms() - answer.end_ms < PATIENCE_MS:
                    self._waiting.append(answer)
                else:
                    self.stamps[answer.rid] = {**stamps, "client_end": answer.end_ms}
            await asyncio.sleep(EVERY_S)


def _stamps(reply: list[Any]) -> dict[str, float]:
    return {stamp: float(value) for stamp, value in zip(STAMPS, reply, strict=True) if value}


# --- a scenario's load ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScenarioAnswers:
    """The answers of a scenario. `stamps` is by rid; `seconds` is from the first request to the last answer."""

    scenario: Scenario
    answers: list[Answer]
    stamps: dict[str, dict[str, float]]
    seconds: float


async def drive(scenario: Scenario, base: Base, models: list[str], client: AsyncRedis) -> ScenarioAnswers:
    """As many clients as the scenario's concurrency, each asking again as soon as it has its answer; `models` has as
    many names as the scenario asks for."""
    collector = StampCollector(client)
    turns = iter(range(scenario.requests))
    answers: list[Answer] = []

    async def one_client() -> None:
        for index in turns:
            user, model = scenario.turn(index)
            text = prompt(index, scenario.prompt_bytes)
            body = chat(models[model], text, scenario.max_tokens, scenario.stream)
            answer = await ask(base, body, user=f"user-{user}")
            answers.append(answer)
            if answer.error is None and answer.rid:
                collector.add(answer)

    complete = asyncio.Event()
    began = now_ms()
    async with asyncio.TaskGroup() as tasks:
        collecting = tasks.create_task(collector.run(complete))
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(scenario.concurrency):
                    clients.create_task(one_client())
        finally:
            complete.set()
        seconds = (max(answer.end_ms for answer in answers) - began) / 1000
        await collecting
    return ScenarioAnswers(scenario, answers, collector.stamps, seconds)


# --- its report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """The share of one model or one user. `latency` is in ms at the client, None without a success."""

    requests: int
    success: int
    tokens_per_second: float
    latency: Summary | None


@dataclass(frozen=True, slots=True)
class ScenarioReport:
    """Durations are in ms. `client` holds what the client's own clock alone tells: ttft (streams) and total."""

    scenario: str
    total: int
    success: int
    errors: dict[str, int]
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    segments: dict[str, Summary]
    client: dict[str, Summary]
    models: dict[str, Group]
    users: dict[str, Group]
    faults: list[str] = field(default_factory=list)
    """Why the scenario fails; empty for one that passed."""


def report(measured: ScenarioAnswers) -> ScenarioReport:
    """Summarise; a request that failed, a segment without data for every success and wrong clocks are faults."""
    answers = measured.answers
    seconds = measured.seconds
    good = [answer for answer in answers if answer.error is None]
    errors = Counter(answer.error for answer in answers if answer.error is not None)
    faults = [f"{count} requests failed: {kind}" for kind, count in errors.items()]
    if not good:
        faults.append("no request succeeded")
    by_segment: dict[str, list[float]] = {name: [] for name in SEGMENTS}
    for answer in good:
        try:
            for name, took in durations(measured.stamps.get(answer.rid, {})).items():
                by_segment[name].append(took)
        except ClocksDiffer as error:
            faults.append(str(error))
    for name, values in by_segment.items():
        if len(values) < len(good) or not values:
            begin, end = SEGMENTS[name]
            faults.append(
                f"segment {name!r} has data for {len(values)} of {len(good)} requests: {begin} or {end} missing"
            )
    client = {
        "ttft": [answer.first_ms - answer.sent_ms for answer in good if answer.first_ms is not None],
        "total": [answer.end_ms - answer.sent_ms for answer in good],
    }
    if measured.scenario.stream and len(client["ttft"]) < len(good):
        faults.append(f"{len(good) - len(client['ttft'])} streams showed no text")
    return ScenarioReport(
        scenario=measured.scenario.name,
        total=len(answers),
        success=len(good),
        errors=dict(errors),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        tokens_per_second=sum(answer.tokens for answer in good) / seconds,
        segments={name: summarise(values) for name, values in by_segment.items() if values},
        client={name: summarise(values) for name, values in client.items() if values},
        models=_groups(answers, seconds, lambda answer: answer.model),
        users=_groups(answers, seconds, lambda answer: answer.user),
        faults=faults,
    )


def _groups(answers: Iterable[Answer], seconds: float, key: Callable[[Answer], str]) -> dict[str, Group]:
    shares: dict[str, list[Answer]] = defaultdict(list)
    for answer in answers:
        shares[key(answer)].append(answer)
    groups: dict[str, Group] = {}
    for name in sorted(shares, key=lambda name: (len(name), name)):
        good = [answer for answer in shares[name] if answer.error is None]
        latency = summarise([answer.end_ms - answer.sent_ms for answer in good]) if good else None
        tokens = sum(answer.tokens for answer in good)
        groups[name] = Group(len(shares[name]), len(good), tokens / seconds, latency)
    return groups


def table(report: ScenarioReport) -> str:
    """The report as text of fixed columns, at most 100 wide."""
    lines = [
        f"{report.scenario}: {report.total} requests, {report.success} succeeded in {report.seconds:.2f} s, "
        f"{report.requests_per_second:.1f} req/s, {report.tokens_per_second:.0f} tok/s",
        _row("segment (ms)", "count", "mean", "p50", "p95", "p99", "max"),
    ]
    rows = [*report.segments.items(), *((f"client {name}", summary) for name, summary in report.client.items())]
    for name, summary in rows:
        lines.append(_row(name, summary.count, summary.mean, summary.p50, summary.p95, summary.p99, summary.max))
    for title, groups in (("model", report.models), ("user", report.users)):
        lines.append(_row(title, "ok", "tok/s", "mean", "p50", "p95", "max"))
        for name, group in groups.items():
            latency = group.latency
            figures = [latency.mean, latency.p50, latency.p95, latency.max] if latency else []
            lines.append(_row(name, f"{group.success}/{group.requests}", round(group.tokens_per_second), *figures))
    return "\n".join([*lines, *(f"FAILED: {fault}" for fault in report.faults)])


def _row(name: str, *cells: str | float) -> str:
    texts = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return table_row(f"  {name}", texts, 18, 10)


# --- the command ------------------------------------------------------------------------------------------------------


@benchmark
@click.argument("scenarios", nargs=-1)
@redis_option
def load(
    scenarios: tuple[str, ...],
    url: Annotated[str | None, {"metavar": "URL"}, "API of the farm to load, such as http://127.0.0.1:8000."] = None,
    redis_url: str | None = None,
    models: Annotated[tuple[str, ...], "--model", "Model to ask; repeatable [default: all that are served]."] = (),
    own: Annotated[bool, "--self", "Start a private farm for each scenario, with its models and replicas."] = False,
    source: Annotated[str, "With --self: model to serve."] = "demo",
    tp: Annotated[int, "With --self: ranks per replica."] = 1,
    devices: Annotated[str, "With --self: one per rank."] = "cpu",
) -> Outcome:
    """Run SCENARIOS and print the figures of each; the exit status is 1 if one fails.

    A scenario fails if a request fails, or if a segment has no data.
    """
    if own == (url is not None):
        raise click.UsageError("give either --url (and --redis) of a farm that runs, or --self")
    spec = build_spec(source, tp=tp, devices=devices, demo=MODEL_DIR)
    reports: list[ScenarioReport] = []
    for scenario in scenarios_of(scenarios):
        with ExitStack() as stack:
            if own:
                say(f"{scenario.name}: starting {' + '.join(map(str, scenario.replicas))} replicas of {spec.name}")
                farm = stack.enter_context(private_farm(spec, *NOBODY_REFUSED, replicas=scenario.replicas))
                place = farm.url, farm.redis_url, farm.names
            else:
                place = url or "", _redis(redis_url), list(models)
            reports.append(asyncio.run(_measure(scenario, *place)))
        click.echo(table(reports[-1]) + "\n")
    figures = [Figure(f"{result.scenario}: faults", len(result.faults), 0) for result in reports]
    return Outcome(figures, {"scenarios": reports})


load.epilog = f"Scenarios: {', '.join(SCENARIOS)}; all of them where none is named."


def _redis(redis_url: str | None) -> str:
    url = redis_url or redis_url_from_environment()
    if url is None:
        raise click.UsageError("the timestamps are in Redis: give --redis redis://host:port or set REDIS_URL")
    return url


async def _measure(scenario: Scenario, url: str, redis_url: str, models: list[str]) -> ScenarioReport:
    try:
        base = Base.of(url)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    models = models or await _served(base)
    if len(models) < scenario.models:
        raise click.UsageError(f"{scenario.name} asks {scenario.models} models; served: {', '.join(models) or 'none'}")
    client = connect_async(redis_url)
    try:
        return report(await drive(scenario, base, models, client))
    except* FurrowError as group:
        raise group.exceptions[0] from group
    finally:
        await client.aclose()


async def _served(base: Base) -> list[str]:
    """The models that the API lists."""
    try:
        async with request(base, "GET", "/v1/models") as response:
            return [model["id"] for model in json.loads(await response.read())["data"]]
    except OSError as error:
        raise click.UsageError(f"no API answers at {base.host}:{base.port}: {error.strerror or error}") from error
