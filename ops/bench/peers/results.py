"""The measurements of each row: from the stamps of a run to figures, their medians and ratios; and the figures that
Furrow is to reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from statistics import median
from typing import Any

from ops.bench.peers.engine import Failed, Row, Stream
from ops.harness.program import Figure, percentile


@dataclass(frozen=True, slots=True)
class RunFigures:
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


def figures(streams: Sequence[Stream]) -> RunFigures:
    """Of checked streams of two tokens or more. Raises Failed where they never all decoded."""
    began = min(stream.sent for stream in streams)
    ended = max(stream.stamps[-1] for stream in streams)
    gaps = sorted(later - earlier for stream in streams for earlier, later in pairwise(stream.stamps))
    return RunFigures(
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
    """The share of the answers that is equal, counted from their beginnings: 1 if all are equal."""
    same = 0
    for answer, expected in zip(streams, reference, strict=True):
        for ours, theirs in zip(answer.tokens, expected.tokens, strict=True):
            if ours != theirs:
                break
            same += 1
    return same / sum(len(stream.tokens) for stream in reference)


@dataclass
class EngineResult:
    """One row over all rounds. Index i of a list belongs to the row's i-th round."""

    row: Row
    skipped: str | None = None
    """Why it could not be measured at all."""
    failed: str | None = None
    """The error that ended its measurement."""
    first_token_s: list[float] = field(default_factory=list)
    """From the start of its first process to the first token of a short prompt."""
    memory_mib: list[float] = field(default_factory=list)
    runs: dict[int, list[RunFigures]] = field(default_factory=dict)
    """By streams."""
    ttft_ms: dict[int, list[float]] = field(default_factory=dict)
    """By the prompt's length."""
    equal: list[float] = field(default_factory=list)
    """The share of the answers that equals the first row's, one entry per run."""

    def median(self, streams: int) -> RunFigures | None:
        """None where it was not measured with so many."""
        rounds = self.runs.get(streams)
        if not rounds:
            return None
        return RunFigures(*(median(getattr(figures, part.name) for figures in rounds) for part in fields(RunFigures)))

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "row": str(self.row)}


@dataclass
class EngineResults:
    """All rows, in the order in which they were asked for."""

    rows: dict[Row, EngineResult]

    def of(self, name: str) -> EngineResult | None:
        """The row with this name, if it was measured."""
        engine, _, weights = name.partition(":")
        result = self.rows.get(Row(engine, weights))
        return result if result is not None and result.runs else None

    def ratio(
        self, ours: EngineResult, theirs: EngineResult, streams: int, part: Callable[[RunFigures], float]
    ) -> float | None:
        """The median over rounds of ours over theirs in the same round: what slowed one slowed the other."""
        pairs = list(zip(ours.runs.get(streams, []), theirs.runs.get(streams, []), strict=False))
        return median(part(mine) / part(peer) for mine, peer in pairs) if pairs else None

    @property
    def faults(self) -> list[str]:
        """Why the whole is a failure; empty where every row that could be measured was."""
        faults = [f"{result.row}: {result.failed}" for result in self.rows.values() if result.failed]
        if not any(result.runs or result.ttft_ms for result in self.rows.values()):
            faults.append("nothing was measured")
        return faults


# --- goals ------------------------------------------------------------------------------------------------------------


Share = Callable[[EngineResult, int], float | None]
"""(row, streams) → its decode rate as a share of the limit."""

LLAMA = ("llama-server", "llama.cpp")
FURROW = ("furrow-farm", "furrow-loop")


@dataclass(frozen=True)
class Goal:
    """`engines` of `weights` at so many streams, the first that was measured, against the first of `over`: at least
    `factor` times its decode rate, or with `prompt` at most `factor` times its time to the first token."""

    weights: str
    streams: int
    factor: float
    over: tuple[str, ...] = ()
    """ENGINE:WEIGHTS; empty for the machine's limit."""
    prompt: int = 0
    engines: tuple[str, ...] = FURROW
    than_streams: int = 0
    """Against itself at so many streams."""
    memory: bool = False
    """At most `factor` times its memory."""
    start: bool = False
    """With `prompt`: the time from its start to the first token counts too."""

    def figure(self, results: EngineResults, share: Share) -> Figure | str:
        """The measured figure, or the name of the row that was not measured."""
        ours = _first(results, [f"{engine}:{self.weights}" for engine in self.engines])
        if ours is None:
            return f"{' or '.join(self.engines)}:{self.weights}"
        theirs = _first(results, self.over)
        if self.over and theirs is None:
            return " or ".join(self.over)
        value = self._value(results, ours, theirs, share)
        if value is None:
            return f"{ours.row} with {self.streams} streams" if not self.prompt else f"a prompt of {self.prompt}"
        return Figure(self._name(ours, theirs), value, self.factor, at_least=not (self.prompt or self.memory))

    def _value(
        self, results: EngineResults, ours: EngineResult, theirs: EngineResult | None, share: Share
    ) -> float | None:
        if self.prompt:
            pairs = [] if theirs is None else [self._prompt_ms(result) for result in (ours, theirs)]
            ratios = [mine / other for mine, other in zip(*pairs, strict=False)]
            return median(ratios) if ratios else None
        if self.memory:
            pairs = [] if theirs is None else zip(ours.memory_mib, theirs.memory_mib, strict=False)
            ratios = [mine / other for mine, other in pairs]
            return median(ratios) if ratios else None
        if self.than_streams:
            many = ours.median(self.streams)
            few = ours.median(self.than_streams)
            return many.decode / few.decode if many and few else None
        if theirs is None:
            return share(ours, self.streams)
        return results.ratio(ours, theirs, self.streams, lambda figures: figures.decode)

    def _prompt_ms(self, result: EngineResult) -> list[float]:
        """By round."""
        first = result.ttft_ms.get(self.prompt, [])
        if not self.start:
            return first
        return [1000 * start + ms for start, ms in zip(result.first_token_s, first, strict=False)]

    def _name(self, ours: EngineResult, theirs: EngineResult | None) -> str:
        subject = f"first token of {self.prompt}" if self.prompt else f"{self.streams} streams"
        subject = "memory" if self.memory else f"start and {subject}" if self.start else subject
        against = f"its {self.than_streams} streams" if self.than_streams else str(theirs.row) if theirs else "limit"
        return f"{ours.row} / {against}, {subject}"


def _llama(weights: str) -> tuple[str, ...]:
    return tuple(f"{engine}:{weights}" for engine in LLAMA)


def _farm_beside_loop(weights: str) -> list[Goal]:
    loop = (f"furrow-loop:{weights}",)
    return [Goal(weights, streams, 0.97, loop, engines=("furrow-farm",)) for streams in (1, 8)]


def _blocks(weights: str, factor: float) -> list[Goal]:
    """Beside Furrow's own int8, and beside llama.cpp with weights of the same format."""
    own = tuple(f"{engine}:int8" for engine in FURROW)
    return [
        Goal(weights, 1, factor, own),
        Goal(weights, 8, 1.0, own),
        Goal(weights, 1, 1.1, _llama(weights)),
        Goal(weights, 8, 1.5, _llama(weights)),
        Goal(weights, 1, 0.8, _llama(weights), prompt=512),
    ]


GOALS: dict[tuple[str, str], list[Goal]] = {
    ("tiny", "cpu"): [Goal("f32", n, factor, _llama("f32")) for n, factor in ((1, 0.5), (16, 1.0), (64, 1.2))],
    ("qwen3-0.6b", "cpu"): [
        Goal("f32", 1, 0.90, _llama("f32")),
        Goal("f32", 1, 0.80),
        Goal("f16", 1, 1.0, _llama("bf16")),
        Goal("f16", 8, 1.4, _llama("bf16")),
        Goal("int8", 1, 0.95, _llama("q8_0")),
        Goal("int8", 8, 2.0, _llama("q8_0")),
        Goal("int8", 8, 7.0, ("transformers-serve:f32",)),
        Goal("int8", 64, 1.0, than_streams=8),
        Goal("int8", 1, 0.6, _llama("q8_0"), prompt=512),
        *_farm_beside_loop("f32"),
        *_blocks("q4_0", 1.25),
        *_blocks("q4k", 1.15),
        *_blocks("q4_k_m", 1.15),
        Goal("f16", 1, 1.0, _llama("bf16"), prompt=512),
        Goal("int8", 1, 1.6, ("llama-server:q8_0",), engines=("furrow-farm",), memory=True),
        Goal("int8", 1, 4.0, ("llama-server:q8_0",), engines=("furrow-farm",), prompt=512, start=True),
    ],
    ("qwen3-0.6b", "cuda"): [Goal("bf16", streams, 0.35) for streams in (1, 8)],
    ("qwen3-8b", "cuda"): [
        *(Goal("bf16", n, share) for n, share in ((1, 0.80), (8, 0.75), (64, 0.65), (256, 0.60))),
        *(Goal("bf16", n, 3.0, ("transformers-serve:bf16",)) for n in (1, 8, 64, 256)),
        *_farm_beside_loop("bf16"),
    ],
}


def judged(goals: list[Goal], results: EngineResults, share: Share) -> tuple[list[Figure], list[str]]:
    """The figures of all goals that were measured, and what the others lack."""
    outcomes = [goal.figure(results, share) for goal in goals]
    figures = [outcome for outcome in outcomes if isinstance(outcome, Figure)]
    return figures, [outcome for outcome in outcomes if isinstance(outcome, str)]


def _first(results: EngineResults, names: tuple[str, ...] | list[str]) -> EngineResult | None:
    return next((result for name in names if (result := results.of(name)) is not None), None)
