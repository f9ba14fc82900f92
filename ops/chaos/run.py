"""A run: a schedule that is a function of the seed, so that it can be repeated, its strikes under load, each with its
proof, and the report: one row per kind of fault, and every stream that was not exact."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.chaos.errors import Harm, NoEffect
from ops.chaos.faults import FAULTS, ON_ANY_FARM
from ops.chaos.load import Checked, Load, longest_silence
from ops.chaos.system.target import Target, View
from ops.harness.program import summarise

EARLY = 0.25
"""Share of strikes that do not wait for the recovery from the strike before."""
EARLY_IN_A_ROW = 2
"""An agent gives a replica up that dies seven times without having been ready."""
EARLY_DELAY_S = 1.0
CALM_DELAY_S = 1.5
UNDER_WAY = 0.75
"""Share of the streams that must have had an event since the farm was whole before a calm strike."""
UNDER_WAY_WITHIN_S = 180.0


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault. `early`: `delay_s` after the proof of the last strike, during detection, rendezvous, load or prefill;
    else `delay_s` after all streams are under way."""

    kind: str
    early: bool
    delay_s: float
    seed: int
    """The seed of the fault's own random choices."""


def schedule(kinds: Sequence[str], times: int, seed: int) -> list[Strike]:
    """`times` strikes of each kind in a shuffled order."""
    draw = random.Random(seed)
    order = [kind for kind in kinds for _ in range(times)]
    draw.shuffle(order)
    strikes: list[Strike] = []
    in_a_row = EARLY_IN_A_ROW  # the first one finds the farm whole
    for kind in order:
        early = in_a_row < EARLY_IN_A_ROW and draw.random() < EARLY
        in_a_row = in_a_row + 1 if early else 0
        delay = draw.uniform(0, EARLY_DELAY_S if early else CALM_DELAY_S)
        strikes.append(Strike(kind, early, delay, draw.getrandbits(32)))
    return strikes


@dataclass(frozen=True, slots=True)
class StrikeRecord:
    """A strike that was made, from its signal to its proof, by the monotonic clock."""

    strike: Strike
    began: float
    ended: float
    streams: int
    """Under way when it struck."""
    proof: str | None
    """None without a proved effect, or if the harm was too large; `detail` has the reason."""
    detail: str = ""


def strike_all(
    target: View,
    load: Load,
    strikes: Sequence[Strike],
    streams: int,
    records: list[StrikeRecord],
    say: Callable[[str], None],
) -> None:
    """Make all strikes and append a record of each to `records`.

    Raises ChaosError if the farm does not recover from one.
    """
    since = time.monotonic()
    for number, strike in enumerate(strikes, 1):
        if not strike.early:
            target.wait_until_whole()
            whole_at = time.monotonic()
            target.until(
                lambda whole_at=whole_at: load.running(whole_at) >= UNDER_WAY * streams,
                f"{UNDER_WAY:.0%} of the streams go on after strike {number - 1}",
                UNDER_WAY_WITHIN_S,
            )
            since = whole_at
        target.rest(strike.delay_s)
        record = _strike(target, load, strike, since)
        records.append(record)
        wrong = sum(bool(checked.findings) for checked in list(load.checked))
        say(
            f"{number}/{len(strikes)} {strike.kind}{' (early)' if strike.early else ''}: {record.proof or 'FAILED'} "
            f"{record.detail}after {record.ended - record.began:.2f} s; {record.streams} streams under way, "
            f"{len(load.checked)} ended, {wrong} wrong"
        )
    target.wait_until_whole()


def _strike(target: View, load: Load, strike: Strike, since: float) -> StrikeRecord:
    streams = load.running(since)
    began = time.monotonic()
    try:
        draw = random.Random(strike.seed)
        if isinstance(target, Target):
            proof = FAULTS[strike.kind](target, draw)
        else:
            proof = ON_ANY_FARM[strike.kind](target, draw)
    except (NoEffect, Harm) as error:
        return StrikeRecord(strike, began, time.monotonic(), streams, None, f"{error} ")
    return StrikeRecord(strike, began, time.monotonic(), streams, proof)


# --- the report -------------------------------------------------------------------------------------------------------


HEADINGS = ("fault", "strikes", "proved", "streams", "exact", "resumed", "gap s", "p99", "worst")
WIDTHS = (20, 8, 8, 9, 9, 9, 8, 8, 8)


@dataclass(frozen=True, slots=True)
class KindRow:
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


def rows(records: Sequence[StrikeRecord], checked: Sequence[Checked]) -> list[KindRow]:
    """In order of name."""
    return [
        _row(kind, [record for record in records if record.strike.kind == kind], checked)
        for kind in sorted({record.strike.kind for record in records})
    ]


def _row(kind: str, records: list[StrikeRecord], checked: Sequence[Checked]) -> KindRow:
    met = [(record, stream) for record in records for stream in checked if under_way(stream, record)]
    gaps = [longest_silence(stream.attempt, record.began, record.ended) for record, stream in met]
    seconds = [gap for gap in gaps if gap is not None]
    summary = summarise(seconds) if seconds else None
    return KindRow(
        kind=kind,
        strikes=len(records),
        proved=sum(record.proof is not None for record in records),
        streams=len(met),
        exact=sum(not stream.findings for _, stream in met),
        resumed=sum(again(stream, record) for record, stream in met),
        gap_median_s=summary.p50 if summary else math.nan,
        gap_p99_s=summary.p99 if summary else math.nan,
        gap_worst_s=summary.max if summary else math.nan,
    )


def under_way(stream: Checked, record: StrikeRecord) -> bool:
    """True if the stream had begun when the fault struck, and had not ended."""
    return stream.attempt.began < record.began < stream.attempt.ended


def again(stream: Checked, record: StrikeRecord) -> int:
    """The client's new connections during the fault."""
    return sum(record.began < moment < record.ended for moment in stream.attempt.connected[1:])


def passed(records: Sequence[StrikeRecord], checked: Sequence[Checked]) -> bool:
    """Every strike proved and every stream exact, and there were some of both."""
    exact = all(not stream.findings for stream in checked)
    return bool(records) and bool(checked) and exact and all(record.proof is not None for record in records)


def table(rows: Sequence[KindRow]) -> list[str]:
    """Lines of text."""
    lines = ["".join(f"{word:>{width}}" for word, width in zip(HEADINGS, WIDTHS, strict=True))]
    for row in rows:
        gaps = [f"{gap:.2f}" for gap in (row.gap_median_s, row.gap_p99_s, row.gap_worst_s)]
        words = [row.kind, row.strikes, row.proved, row.streams, row.exact, row.resumed, *gaps]
        lines.append("".join(f"{word:>{width}}" for word, width in zip(words, WIDTHS, strict=True)))
    return lines


def lines(seed: int, records: Sequence[StrikeRecord], checked: Sequence[Checked]) -> list[str]:
    """The table, the number of exact streams, and every broken stream."""
    exact = sum(not stream.findings for stream in checked)
    total = f"seed {seed}: {exact} of {len(checked)} streams exact, {len(records)} strikes"
    return [*table(rows(records, checked)), total, *(f"BROKEN {stream}" for stream in broken(checked, records))]


def broken(checked: Sequence[Checked], records: Sequence[StrikeRecord]) -> list[dict[str, Any]]:
    """Every stream that was not exact, with its strikes and its connections."""
    return [
        {
            "question": stream.attempt.question.name,
            "rid": sorted(stream.attempt.transcript.rids),
            "findings": stream.findings,
            "connections": len(stream.attempt.connected),
            "refusals": stream.attempt.refusals,
            "strikes": [n for n, record in enumerate(records, 1) if under_way(stream, record)],
        }
        for stream in checked
        if stream.findings
    ]


def document(machine: str, seed: int, records: Sequence[StrikeRecord], checked: Sequence[Checked]) -> dict[str, Any]:
    """The content of the JSON file."""
    return {
        "machine": machine,
        "seed": seed,
        "passed": passed(records, checked),
        "streams": len(checked),
        "exact": sum(not stream.findings for stream in checked),
        "resumed": sum(len(stream.attempt.connected) - 1 for stream in checked),
        "kinds": [asdict(row) for row in rows(records, checked)],
        "strikes": [asdict(record) for record in records],
        "broken": broken(checked, records),
    }
