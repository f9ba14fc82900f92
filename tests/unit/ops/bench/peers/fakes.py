"""Engines without a model: they answer as they are told, on a clock that the test can read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ops.bench.peers.engine import Engine, Row, Stream, Unavailable


def stream(sent: float, *stamps: float, tokens: list[int] | None = None) -> Stream:
    return Stream(sent, list(stamps), tokens or list(range(len(stamps))))


@dataclass
class FakeEngine:
    """Each token takes `seconds`; answers `fewer` tokens than asked from its second run on."""

    seconds: float = 0.5
    fewer: int = 0
    refusal: Exception | None = None
    asked: list[tuple[list[list[int]], int]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def start(self) -> float:
        self.events.append("start")
        if self.refusal is not None:
            raise self.refusal
        return 8.0

    def run(self, prompts: list[list[int]], tokens: int) -> list[Stream]:
        self.events.append(f"run {len(prompts)}")
        count = tokens - (self.fewer if self.asked else 0)
        self.asked.append((prompts, tokens))
        return [stream(10.0, *(10.0 + self.seconds * (n + 1) for n in range(count))) for _ in prompts]

    def stop(self) -> None:
        self.events.append("stop")


def made(**engines: FakeEngine) -> Callable[[Row, dict[str, int]], Engine]:
    """A `make` that gives the engine with the row's name, the same one each time."""

    def make(row: Row, sizes: dict[str, int]) -> Engine:
        if row.engine not in engines:
            raise Unavailable(f"no {row.engine} here")
        return engines[row.engine]

    return make
