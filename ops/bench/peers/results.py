"""The measurements of each row: from the stamps of a run to figures, their medians and ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from statistics import median
from typing import Any

from ops.bench.peers.engine import Failed, Row, Stream
from ops.harness.program import percentile


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or medians over rounds. Times in ms; rates in tokens per second, over all streams."""

    decode: float
    """While all streams decode."""
    whole: float
    """From the first prompt sent to the last token, prompts included."""
    ttft: float
    """Until a stream's first token, the median over the streams."""
    gap_p50: float
    gap_p99: float
    """Between two tokens of a stream."""


def check(streams: Sequence[Stream], count: int, tokens: int) -> None:
    """Raises Failed where an answer is missing or shorter than asked: a figure of less would look like one of all."""
    if len(streams) != count:
        raise Failed(f"{len(streams)} of {count} streams were answered")
    for index, stream in enumerate(streams):
        if len(stream.tokens) != tokens or len(stream.stamps) != tokens:
            raise Failed(f"stream {index} has {len(stream.tokens)} tokens and {len(stream.stamps)} times of {tokens}")


def figures(streams: Sequence[Stream]) -> Figures:
    """Of checked streams of two tokens or more. Raises Failed where they never all decoded."""
    began = min(stream.sent for stream in streams)
    ended = max(stream.stamps[-1] for stream in streams)
    gaps = sorted(later - earlier for stream in streams for earlier, later in pairwise(stream.stamps))
    return Figures(
        decode=_steady(streams),
        whole=sum(len(stream.tokens) for stream in streams) / (ended - began),
        ttft=1000 * median(stream.stamps[0] - stream.sent for stream in streams),
        gap_p50=1000 * percentile(gaps, 50),
        gap_p99=1000 * percentile(gaps, 99),
    )


def _steady(streams: Sequence[Stream]) -> float:
    """Tokens between the moment at which the last stream has its first token and the one at which a stream ends."""
    begin = max(stream.stamps[0] for stream in streams)
    end = min(stream.stamps[-1] for stream in streams)
    within = sum(begin < at <= end for stream in streams for at in stream.stamps)
    if end <= begin or within < len(streams):
        raise Failed("a stream ended before the last one began: ask for more --tokens, or a shorter --prompt")
    return within / (end - begin)


def equal_share(streams: Sequence[Stream], reference: Sequence[Stream]) -> float:
    """How much of the answers is the same, counted from their beginnings: 1 where all are equal."""
    same = 0
    for one, other in zip(streams, reference, strict=True):
        for ours, theirs in zip(one.tokens, other.tokens, strict=True):
            if ours != theirs:
                break
            same += 1
    return same / sum(len(stream.tokens) for stream in reference)


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
        return Figures(*(median(getattr(one, part.name) for one in rounds) for part in fields(Figures)))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "row": str(self.row)}


@dataclass
class Results:
    """All rows, in the order in which they were asked for."""

    rows: dict[Row, Result]

    def of(self, name: str) -> Result | None:
        """The row with this name, if it was measured."""
        engine, _, weights = name.partition(":")
        result = self.rows.get(Row(engine, weights))
        return result if result is not None and result.runs else None

    def ratio(self, ours: Result, theirs: Result, streams: int, part: Callable[[Figures], float]) -> float | None:
        """The median over rounds of ours over theirs in the same round: what slowed one slowed the other."""
        pairs = list(zip(ours.runs.get(streams, []), theirs.runs.get(streams, []), strict=False))
        return median(part(one) / part(other) for one, other in pairs) if pairs else None

    @property
    def faults(self) -> list[str]:
        """Why the whole is a failure; empty where every row that could be measured was."""
        faults = [f"{one.row}: {one.failed}" for one in self.rows.values() if one.failed]
        if not any(one.runs or one.ttft_ms for one in self.rows.values()):
            faults.append("nothing was measured")
        return faults
