"""The result of a run: one row per kind of fault, and every stream that was not exact."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.chaos.load import Checked, longest_silence
from ops.chaos.run import Struck

HEADINGS = ("fault", "strikes", "proved", "streams", "exact", "resumed", "gap s", "p99", "worst")
WIDTHS = (20, 8, 8, 9, 9, 9, 8, 8, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind. `streams` counts a stream once for each strike during it, `resumed` the connections made again during a
    fault. Gaps, in seconds, are the longest pause of each of these streams around a strike.
    """

    kind: str
    strikes: int
    proved: int
    streams: int
    exact: int
    resumed: int
    gap_median_s: float
    gap_p99_s: float
    gap_worst_s: float


def rows(struck: Sequence[Struck], checked: Sequence[Checked]) -> list[Row]:
    """In order of name."""
    return [
        _row(kind, [one for one in struck if one.strike.kind == kind], checked)
        for kind in sorted({one.strike.kind for one in struck})
    ]


def _row(kind: str, struck: list[Struck], checked: Sequence[Checked]) -> Row:
    met = [(one, stream) for one in struck for stream in checked if under_way(stream, one)]
    gaps = [longest_silence(stream.attempt, one.began, one.ended) for one, stream in met]
    known = sorted(gap for gap in gaps if gap is not None)
    return Row(
        kind=kind,
        strikes=len(struck),
        proved=sum(one.proof is not None for one in struck),
        streams=len(met),
        exact=sum(not stream.findings for _, stream in met),
        resumed=sum(again(stream, one) for one, stream in met),
        gap_median_s=statistics.median(known) if known else math.nan,
        gap_p99_s=known[math.ceil(0.99 * len(known)) - 1] if known else math.nan,
        gap_worst_s=known[-1] if known else math.nan,
    )


def under_way(stream: Checked, struck: Struck) -> bool:
    """True if the stream had begun when the fault struck, and had not ended."""
    return stream.attempt.began < struck.began < stream.attempt.ended


def again(stream: Checked, struck: Struck) -> int:
    """The client's new connections during the fault."""
    return sum(struck.began < moment < struck.ended for moment in stream.attempt.connected[1:])


def passed(struck: Sequence[Struck], checked: Sequence[Checked]) -> bool:
    """Every strike proved and every stream exact, and there were some of both."""
    exact = all(not stream.findings for stream in checked)
    return bool(struck) and bool(checked) and exact and all(one.proof is not None for one in struck)


def table(found: Sequence[Row]) -> list[str]:
    """Lines of text."""
    lines = ["".join(f"{word:>{width}}" for word, width in zip(HEADINGS, WIDTHS, strict=True))]
    for row in found:
        gaps = [f"{gap:.2f}" for gap in (row.gap_median_s, row.gap_p99_s, row.gap_worst_s)]
        words = [row.kind, row.strikes, row.proved, row.streams, row.exact, row.resumed, *gaps]
        lines.append("".join(f"{word:>{width}}" for word, width in zip(words, WIDTHS, strict=True)))
    return lines


def lines(seed: int, struck: Sequence[Struck], checked: Sequence[Checked]) -> list[str]:
    """The table, the number of exact streams, and every broken stream."""
    exact = sum(not stream.findings for stream in checked)
    total = f"seed {seed}: {exact} of {len(checked)} streams exact, {len(struck)} strikes"
    return [*table(rows(struck, checked)), total, *(f"BROKEN {stream}" for stream in broken(checked, struck))]


def broken(checked: Sequence[Checked], struck: Sequence[Struck]) -> list[dict[str, Any]]:
    """Every stream that was not exact, with its strikes and its connections."""
    return [
        {
            "question": stream.attempt.question.name,
            "rid": sorted(stream.attempt.transcript.rids),
            "findings": stream.findings,
            "connections": len(stream.attempt.connected),
            "refusals": stream.attempt.refusals,
            "strikes": [n for n, one in enumerate(struck, 1) if under_way(stream, one)],
        }
        for stream in checked
        if stream.findings
    ]


def document(machine: str, seed: int, struck: Sequence[Struck], checked: Sequence[Checked]) -> dict[str, Any]:
    """The content of the JSON file."""
    return {
        "machine": machine,
        "seed": seed,
        "passed": passed(struck, checked),
        "streams": len(checked),
        "exact": sum(not stream.findings for stream in checked),
        "resumed": sum(len(stream.attempt.connected) - 1 for stream in checked),
        "kinds": [asdict(row) for row in rows(struck, checked)],
        "strikes": [asdict(one) for one in struck],
        "broken": broken(checked, struck),
    }
