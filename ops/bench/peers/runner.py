"""Takes every row through every round, one engine at a time, so that all meet the same weights and the same machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ops.bench.common import alphabet
from ops.bench.peers import memory
from ops.bench.peers.base import Engine, Failed, Row, Stream, Unavailable
from ops.bench.peers.report import figures
from ops.bench.peers.report.results import Result, Results

SHORT_PROMPT = 16
WARM_UP_TOKENS = 3
FIRST_TOKENS = 2
"""Generated where only the first is asked for; one more, since some engines speak of two at the earliest."""
SLACK_TOKENS = 32
"""KV of a stream beside what it needs: schedulers keep some free."""
MOST_IN_A_ROW = 8
"""More streams than that are not given to an engine that takes one after another: it would only take longer."""


@dataclass(frozen=True)
class Plan:
    """The measurements of each row."""

    rows: tuple[Row, ...]
    streams: tuple[int, ...]
    prompt: int
    tokens: int
    ttft: tuple[int, ...]
    """Lengths of the prompts whose first token is timed, one stream."""
    rounds: int
    vocabulary: int

    def __post_init__(self) -> None:
        """Raises ValueError for fewer than two tokens: a rate needs two moments."""
        if self.tokens < 2:
            raise ValueError(f"{self.tokens} tokens have no rate; ask for at least 2")

    @property
    def sizes(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], dict[str, int]]]:
        """Streams, lengths of prompts, and the sizes in Setup for each start of an engine: long prompts have one of
        their own, so that many streams need not each have room for one."""
        usual = self.prompt + self.tokens
        short = tuple(length for length in self.ttft if length + FIRST_TOKENS <= usual)
        if self.streams or short:
            most = max(self.streams, default=1)
            yield self.streams, short, {"streams": most, "context": usual, "kv_tokens": most * (usual + SLACK_TOKENS)}
        if long := tuple(length for length in self.ttft if length not in short):
            context = max(long) + FIRST_TOKENS
            yield (), long, {"streams": 1, "context": context, "kv_tokens": context + SLACK_TOKENS}


class Runner:
    """`make` makes the engine of a row with the sizes of a Setup; `say` tells what goes on."""

    def __init__(
        self,
        plan: Plan,
        make: Callable[[Row, dict[str, int]], Engine],
        say: Callable[[str], None],
        before_round: Callable[[], None] = lambda: None,
        after_visit: Callable[[Results], None] = lambda results: None,
    ) -> None:
        self._plan, self._make, self._say = plan, make, say
        self._before_round, self._after_visit = before_round, after_visit
        self.results = Results({row: Result(row) for row in plan.rows})
        self._reference: dict[tuple[int, int], list[Stream]] = {}
        """The answers of the first row in this round, by streams and tokens."""

    def run(self) -> Results:
        """Run all rounds. The results name rows that can't be measured, and rows that broke."""
        for turn in range(self._plan.rounds):
            self._before_round()
            self._reference.clear()
            for row, result in self.results.rows.items():
                if not (result.skipped or result.failed):
                    self._say(f"round {turn + 1} of {self._plan.rounds}: {row}")
                    self._visit(result, turn)
                    self._after_visit(self.results)
        return self.results

    def _visit(self, result: Result, turn: int) -> None:
        try:
            for streams, lengths, sizes in self._plan.sizes:
                peak = memory.Peak()
                with self._started(result, sizes, turn, peak) as engine:
                    for count in streams:
                        if engine.at_once or count <= MOST_IN_A_ROW:
                            self._decode(result, engine, count, turn)
                    for length in lengths:
                        self._first_token(result, engine, length, turn)
                    with peak.watched():
                        self._ask(engine, 1, max((self._plan.prompt, *lengths)), FIRST_TOKENS, turn, "memory")
                result.memory_mib.append(peak.mib)
        except Unavailable as why:
            result.skipped = str(why)
            self._say(f"{result.row} is skipped: {why}")
        except Failed as why:
            result.failed = str(why)
            self._say(f"{result.row} failed: {why}")

    @contextmanager
    def _started(self, result: Result, sizes: dict[str, int], turn: int, peak: memory.Peak) -> Generator[Engine]:
        """The engine once it has answered something short. Its memory is watched meanwhile."""
        engine = self._make(result.row, sizes)
        try:
            with peak.watched():
                began = engine.start()
                [stream] = self._ask(engine, 1, SHORT_PROMPT, FIRST_TOKENS, turn, "start")
            result.first_token_s.append(stream.stamps[0] - began)
            yield engine
        finally:
            engine.stop()

    def _decode(self, result: Result, engine: Engine, count: int, turn: int) -> None:
        plan = self._plan
        # With company, memory and kernels for that many are made ready.
        self._ask(engine, count, SHORT_PROMPT, WARM_UP_TOKENS, turn, "warm up")
        streams = self._ask(engine, count, plan.prompt, plan.tokens, turn, "decode")
        result.runs.setdefault(count, []).append(figures.figures(streams, engine.at_once))
        reference = self._reference.setdefault((count, plan.tokens), streams)
        result.equal.append(figures.equal_share(streams, reference))

    def _first_token(self, result: Result, engine: Engine, length: int, turn: int) -> None:
        [stream] = self._ask(engine, 1, length, FIRST_TOKENS, turn, "first token")
        result.ttft_ms.setdefault(length, []).append(1000 * (stream.stamps[0] - stream.sent))

    def _ask(self, engine: Engine, count: int, length: int, tokens: int, turn: int, what: str) -> list[Stream]:
        """The same prompts for every engine, new ones each time: no engine has seen any of them."""
        chance = random.Random(f"{what} {turn} {count} {length}")
        ids = range(alphabet.FIRST, self._plan.vocabulary)
        streams = engine.run([chance.choices(ids, k=length) for _ in range(count)], tokens)
        figures.check(streams, count, tokens)
        return streams
