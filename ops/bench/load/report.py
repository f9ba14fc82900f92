"""The result of a scenario: figures, the faults that fail it, and both as a table or as JSON."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ops.bench.common.ask import Answer
from ops.bench.common.summary import Summary, summarise
from ops.bench.load.segments import SEGMENTS, ClocksDiffer, durations
from ops.bench.load.traffic import Measured


@dataclass(frozen=True, slots=True)
class Group:
    """The share of one model or one user. `latency` is in ms at the client, None without a success."""

    requests: int
    success: int
    tokens_per_second: float
    latency: Summary | None


@dataclass(frozen=True, slots=True)
class Report:
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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def report(measured: Measured) -> Report:
    """Summarise; a request that failed, a segment without data for every success and wrong clocks are faults."""
    answers, seconds = measured.answers, measured.seconds
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
    return Report(
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


def table(report: Report) -> str:
    """The report as text of fixed columns, at most 100 wide."""
    lines = [
        f"{report.scenario}: {report.total} requests, {report.success} succeeded in {report.seconds:.2f} s, "
        f"{report.requests_per_second:.1f} req/s, {report.tokens_per_second:.0f} tok/s",
        _row("segment (ms)", "count", "mean", "p50", "p95", "p99", "max"),
    ]
    lines += [_summary_row(name, summary) for name, summary in report.segments.items()]
    lines += [_summary_row(f"client {name}", summary) for name, summary in report.client.items()]
    for title, groups in (("model", report.models), ("user", report.users)):
        lines.append(_row(title, "ok", "tok/s", "mean", "p50", "p95", "max"))
        for name, group in groups.items():
            latency = group.latency
            figures = [latency.mean, latency.p50, latency.p95, latency.max] if latency else []
            texts = [f"{group.success}/{group.requests}", f"{group.tokens_per_second:.0f}"]
            lines.append(_row(name, *texts, *(f"{figure:.1f}" for figure in figures)))
    lines += [f"FAILED: {fault}" for fault in report.faults]
    return "\n".join(lines)


def _summary_row(name: str, summary: Summary) -> str:
    figures = (summary.mean, summary.p50, summary.p95, summary.p99, summary.max)
    return _row(name, str(summary.count), *(f"{figure:.1f}" for figure in figures))


def _row(name: str, *cells: str) -> str:
    return f"  {name:<16}" + "".join(f"{cell:>10}" for cell in cells)
