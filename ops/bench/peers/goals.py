"""The figures that Furrow is to reach, by shape of model: each beside a peer or the machine's limit, within one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ops.bench.peers.results import Result, Results
from ops.harness.program import Figure

Share = Callable[[Result, int], float | None]
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

    def figure(self, results: Results, share: Share) -> Figure | str:
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

    def _value(self, results: Results, ours: Result, theirs: Result | None, share: Share) -> float | None:
        if self.prompt:
            pairs = [] if theirs is None else [self._prompt_ms(one) for one in (ours, theirs)]
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

    def _prompt_ms(self, result: Result) -> list[float]:
        """By round."""
        first = result.ttft_ms.get(self.prompt, [])
        if not self.start:
            return first
        return [1000 * start + ms for start, ms in zip(result.first_token_s, first, strict=False)]

    def _name(self, ours: Result, theirs: Result | None) -> str:
        what = f"first token of {self.prompt}" if self.prompt else f"{self.streams} streams"
        what = "memory" if self.memory else f"start and {what}" if self.start else what
        against = f"its {self.than_streams} streams" if self.than_streams else str(theirs.row) if theirs else "limit"
        return f"{ours.row} / {against}, {what}"


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
        *(Goal("bf16", n, 3.0, ("transformers-batching:bf16",)) for n in (1, 8, 64, 256)),
        *_farm_beside_loop("bf16"),
    ],
}


def judged(goals: list[Goal], results: Results, share: Share) -> tuple[list[Figure], list[str]]:
    """The figures of all goals that were measured, and what the others lack."""
    outcomes = [goal.figure(results, share) for goal in goals]
    return [one for one in outcomes if isinstance(one, Figure)], [one for one in outcomes if isinstance(one, str)]


def _first(results: Results, names: tuple[str, ...] | list[str]) -> Result | None:
    return next((result for name in names if (result := results.of(name)) is not None), None)
