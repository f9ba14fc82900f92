"""The measurements of each row, with their medians and ratios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ops.bench.common.summary import median
from ops.bench.peers.base import Row
from ops.bench.peers.report.figures import Figures


@dataclass
class Result:
    """One row over all rounds. Index i of a list belongs to the row's i-th round."""

    row: Row
    skipped: str | None = None
    """Why it could not be measured at all."""
    failed: str | None = None
    """The error that ended its measurement."""
    first_token_s: list[float] = field(default_factory=list)
    """From the start of its first process to the first token of a short prompt."""
    memory_mib: list[float] = field(default_factory=list)
    runs: dict[int, list[Figures]] = field(default_factory=dict)
    """By streams."""
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)
    """By the prompt's length."""
    equal: list[float] = field(default_factory=list)
    """How much of the answers was as the first row's, one entry per run."""

    def median(self, streams: int) -> Figures | None:
        """None where it was not measured with so many."""
        rounds = self.runs.get(streams)
        if not rounds:
            return None
        return Figures(*(median([getattr(one, part.name) for one in rounds]) for part in fields(Figures)))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "row": str(self.row)}


@dataclass
class Results:
    """All rows, in the order in which they were asked for."""

    rows: dict[Row, Result]

    def of(self, name: str) -> Result | None:
        """The row with this name, if it was measured."""
        engine, _, weights = name.partition(":")
        found = self.rows.get(Row(engine, weights))
        return found if found is not None and found.runs else None

    def ratio(self, ours: Result, theirs: Result, streams: int, part: Callable[[Figures], float]) -> float | None:
        """The median over rounds of ours over theirs in the same round: what slowed one slowed the other."""
        pairs = list(zip(ours.runs.get(streams, []), theirs.runs.get(streams, []), strict=False))
        return median([part(one) / part(other) for one, other in pairs]) if pairs else None

    @property
    def faults(self) -> list[str]:
        """Why the whole is a failure; empty where every row that could be measured was."""
        found = [f"{one.row}: {one.failed}" for one in self.rows.values() if one.failed]
        if not any(one.runs or one.ttft_ms for one in self.rows.values()):
            found.append("nothing was measured")
        return found
