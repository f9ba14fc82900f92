"""The engines of a comparison by name, and the rounds: every row in every round, one engine at a time, so that all meet
the same weights and the same machine."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ops.bench.peers.engine import Engine, Failed, Row, Setup, Stream, Unavailable
from ops.bench.peers.hosted import Hosted, bare_loop
from ops.bench.peers.results import EngineResult, EngineResults, check, equal_share, figures
from ops.bench.peers.served import FurrowFarm, LlamaServer, TransformersServe
from ops.harness import alphabet
from ops.harness.processes import Peak

SHORT_PROMPT = 16
WARM_UP_TOKENS = 3
FIRST_TOKENS = 2
"""Generated where only the first is asked for; one more, since some engines speak of two at the earliest."""
SLACK_TOKENS = 32
"""KV of a stream beside what it needs: schedulers keep some free."""


@dataclass(frozen=True)
class Peers:
    """The places and settings of the peers."""

    python: str = sys.executable
    """The interpreter that has their packages."""
    llama_server: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables for them alone."""

    def environment(self, threads: int) -> dict[str, str]:
        """Each runs with its own defaults: what this process sets for Furrow's is not for them."""
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
        return {**inherited, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **self.settings}


Make = Callable[[Setup, Peers], Engine]


def _peer_loop(name: str) -> Make:
    return lambda setup, peers: Hosted(name, setup, peers.python, peers.environment(setup.threads))


ENGINES: dict[str, Make] = {
    "furrow-loop": lambda setup, peers: bare_loop(setup),
    "furrow-farm": lambda setup, peers: FurrowFarm(setup),
    "transformers": _peer_loop("transformers_generate"),
    "transformers-serve": lambda setup, peers: TransformersServe(setup, peers.python, peers.environment(setup.threads)),
    "llama.cpp": _peer_loop("llama_cpp"),
    "llama-server": lambda setup, peers: LlamaServer(setup, peers.llama_server, peers.environment(setup.threads)),
}

NEEDS_GGUF = frozenset({"llama.cpp", "llama-server"})

DEFAULT_ROWS = (
    *(f"furrow-farm:{weights}" for weights in ("f32", "f16", "int8")),
    "furrow-loop:f32",
    *(f"transformers:{weights}" for weights in ("f32", "bf16")),
    "transformers-serve:f32",
    *(f"{engine}:{weights}" for engine in ("llama-server", "llama.cpp") for weights in ("f32", "bf16", "q8_0")),
)


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
        after_visit: Callable[[EngineResults], None] = lambda results: None,
    ) -> None:
        self._plan = plan
        self._make = make
        self._say = say
        self._before_round = before_round
        self._after_visit = after_visit
        self.results = EngineResults({row: EngineResult(row) for row in plan.rows})
        self._reference: dict[tuple[int, int], list[Stream]] = {}
        """The answers of the first row in this round, by streams and tokens."""

    def run(self) -> EngineResults:
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

    def _visit(self, result: EngineResult, turn: int) -> None:
        try:
            for streams, lengths, sizes in self._plan.sizes:
                peak = Peak()
                with self._started(result, sizes, turn, peak) as engine:
                    for count in streams:
                        self._decode(result, engine, count, turn)
                    for length in lengths:
                        [stream] = self._ask(engine, 1, length, FIRST_TOKENS, turn, "first token")
                        result.ttft_ms.setdefault(length, []).append(1000 * (stream.stamps[0] - stream.sent))
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
    def _started(self, result: EngineResult, sizes: dict[str, int], turn: int, peak: Peak) -> Generator[Engine]:
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

    def _decode(self, result: EngineResult, engine: Engine, count: int, turn: int) -> None:
        plan = self._plan
        # With company, memory and kernels for that many are made ready.
        self._ask(engine, count, SHORT_PROMPT, WARM_UP_TOKENS, turn, "warm up")
        streams = self._ask(engine, count, plan.prompt, plan.tokens, turn, "decode")
        result.runs.setdefault(count, []).append(figures(streams))
        reference = self._reference.setdefault((count, plan.tokens), streams)
        result.equal.append(equal_share(streams, reference))

    def _ask(self, engine: Engine, count: int, length: int, tokens: int, turn: int, purpose: str) -> list[Stream]:
        """The same prompts for every engine, new ones each time: no engine has seen any of them."""
        prompts = random_prompts(f"{purpose} {turn} {count} {length}", count, length, self._plan.vocabulary)
        return run_checked(engine, prompts, tokens)


def random_prompts(seed: str, count: int, length: int, vocabulary: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.choices(range(alphabet.FIRST, vocabulary), k=length) for _ in range(count)]


def run_checked(engine: Engine, prompts: list[list[int]], tokens: int) -> list[Stream]:
    """The whole answers to all prompts. Raises Failed."""
    streams = engine.run(prompts, tokens)
    check(streams, len(prompts), tokens)
    return streams
