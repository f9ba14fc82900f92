"""The comparison as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ops.bench.peers.limits import Cost, Machine
from ops.bench.peers.results import EngineResult, EngineResults
from ops.bench.peers.runner import Plan
from ops.harness.program import table_row


@dataclass(frozen=True)
class Comparison:
    """The results beside the machine's limits. Every later row is compared with the first row of the plan."""

    machine: str
    """In words."""
    model: str
    device: str
    plan: Plan
    cost: Cost
    limits: Machine
    results: EngineResults

    @property
    def measured(self) -> list[EngineResult]:
        return [result for result in self.results.rows.values() if result.runs or result.ttft_ms]

    def limit(self, result: EngineResult, streams: int) -> float:
        """Decode rate that the machine allows, tokens per second."""
        context = self.plan.prompt + self.plan.tokens / 2
        return self.cost.decode_limit(self.limits, result.row, self.device, streams, context)

    def share(self, result: EngineResult, streams: int) -> float | None:
        """The share of the limit that a row reached."""
        figures = result.median(streams)
        return figures.decode / self.limit(result, streams) if figures else None

    def raise_limits(self) -> None:
        """No limit is below what an engine does in fact: one stream's rate times the bytes of its steps, and a prompt's
        products in the time to its first token."""
        context = self.plan.prompt + self.plan.tokens / 2
        for result in self.measured:
            if figures := result.median(1):
                size = self.cost.step_bytes(result.row, self.device, 1, context)
                self.limits.implied(str(result.row), figures.decode * size)
            for length, milliseconds in result.ttft_ms.items():
                rate = 1000 * self.cost.prompt_operations(length) / median(milliseconds)
                self.limits.implied_operations(result.row.weights, rate)

    def as_json(self) -> dict[str, Any]:
        plan = {**asdict(self.plan), "rows": [str(row) for row in self.plan.rows]}
        rows = []
        for result in self.results.rows.values():
            counts = sorted(result.runs)
            medians = {count: asdict(figures) for count in counts if (figures := result.median(count))}
            limits = {count: self.limit(result, count) for count in counts}
            rows.append({**result.as_json(), "medians": medians, "limits": limits})
        about = {"machine": self.machine, "model": self.model, "device": self.device, "plan": plan}
        return {**about, "cost": asdict(self.cost), "limits": asdict(self.limits), "rows": rows}


def table(comparison: Comparison) -> str:
    """All sections; a row that was skipped or failed is told with its reason."""
    plan = comparison.plan
    results = comparison.measured
    lines = [_limits(comparison.limits), ""]
    for streams in plan.streams:
        title = f"{counted(streams)}, prompt {plan.prompt}, {plan.tokens} new tokens"
        lines += [f"{title}; medians of {plan.rounds} rounds" if plan.rounds > 1 else f"{title}; one round"]
        lines += [_row("", "decode tok/s", "limit", "share", "whole tok/s", "ttft ms", "gap p50", "p99", "1st / it")]
        lines += [_rates(comparison, result, streams) for result in results if result.median(streams)] + [""]
    lines += [_row("", *(f"{length}: ms (limit)" for length in plan.ttft), "start s", "MiB", "equal")]
    lines += [_once(comparison, result) for result in results]
    for result in comparison.results.rows.values():
        for word, why in (("skipped", result.skipped), ("FAILED", result.failed)):
            if why:
                lines.append(f"  {word} {result.row}: {why}")
    return "\n".join(lines)


def counted(streams: int) -> str:
    """As `1 stream` or `8 streams`."""
    return f"{streams} stream{'s' if streams > 1 else ''}"


def _limits(limits: Machine) -> str:
    read, multiply = (max(rates_of, key=lambda name: rates_of[name]) for rates_of in (limits.read, limits.multiply))
    rates = ", ".join(f"{name} {value / 1e9:.0f}" for name, value in limits.multiply.items())
    return f"limits: reads {limits.bandwidth / 1e9:.1f} GB/s ({read}); multiplies {rates} GFLOP/s (best: {multiply})"


def _rates(comparison: Comparison, result: EngineResult, streams: int) -> str:
    medians = result.median(streams)
    first = comparison.results.rows[comparison.plan.rows[0]]
    assert medians is not None, "only rows with such a run are told of"
    ratio = comparison.results.ratio(first, result, streams, lambda figures: figures.decode)
    return _row(
        str(result.row),
        f"{medians.decode:.1f}",
        f"{comparison.limit(result, streams):.1f}",
        f"{100 * medians.decode / comparison.limit(result, streams):.0f} %",
        f"{medians.whole:.1f}",
        f"{medians.ttft:.0f}",
        f"{medians.gap_p50:.1f}",
        f"{medians.gap_p99:.1f}",
        f"{ratio:.2f}" if ratio is not None else "–",
    )


def _once(comparison: Comparison, result: EngineResult) -> str:
    cells = []
    for length in comparison.plan.ttft:
        least = 1000 * comparison.cost.first_token_limit(comparison.limits, result.row, length)
        measured = result.ttft_ms.get(length)
        cells.append(f"{median(measured):.0f} ({least:.0f})" if measured else "–")
    start = f"{median(result.first_token_s):.1f}"
    memory = f"{max(result.memory_mib):.0f}" if result.memory_mib else "–"
    equal = f"{100 * median(result.equal):.0f} %" if result.equal else "–"
    return _row(str(result.row), *cells, start, memory, equal)


def _row(name: str, *cells: str) -> str:
    return table_row(f"  {name}", cells, 30, 13)
