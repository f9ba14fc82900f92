"""The cost of Furrow in front of an external engine: a scripted one at a fixed rate, asked by a client directly and
through a farm, in turns."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import click
import msgspec

from control.listening import free_port
from control.operations.spec import build_spec
from ops.common.waiting import until
from ops.demo import MODEL_DIR
from ops.harness import scripted_engine
from ops.harness.client import Base, ask, completion
from ops.harness.farm import HOST, private_farm, say
from ops.harness.program import Figure, benchmark, run
from ops.local.ready import is_ready
from worker.external.host import VARIABLE, EngineSettings

SHARE = 0.95
"""Of a bare client's throughput."""
FIRST_TOKEN_MS = 10.0
"""Beyond a bare client's."""
MODEL = "m"
PROMPT = list(range(3, 35))


@dataclass(frozen=True, slots=True)
class StreamRound:
    """One round of streams."""

    rate: float
    """Tokens a second, all streams together, from the first token to the last."""
    first_s: float
    """Median time to a stream's first token."""


@contextmanager
def engine(rate: float) -> Generator[str]:
    """A scripted vLLM that gives each stream so many tokens a second, with a processor of its own where there are
    several; its URL."""
    port = free_port(HOST, 0)
    command = [sys.executable, str(Path(scripted_engine.__file__)), "vllm", "--host", HOST, "--port", str(port)]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        command = ["taskset", "-c", str(cores[-1]), *command]
    with subprocess.Popen(
        command, env={**os.environ, "SCRIPTED_RATE": str(rate)}, stdout=subprocess.DEVNULL
    ) as process:
        try:
            until(lambda: is_ready((HOST, port)), "the engine listens", 30.0)
            yield f"http://{HOST}:{port}"
        finally:
            process.kill()


async def stream_all(base: Base, count: int, tokens: int) -> StreamRound:
    """So many streams of so many tokens at once. Raises RequestFailed."""
    # The fields that Furrow sends to vLLM, which the scripted engine wants from a client too.
    fields = {"min_tokens": 0, "stop_token_ids": [], "return_token_ids": True}
    bodies = [completion(MODEL, [*PROMPT, 3 + index % 100], tokens, **fields) for index in range(count)]
    answers = await asyncio.gather(*(ask(base, body, exact=False) for body in bodies))
    assert all(len(answer.check().token_ids) == tokens for answer in answers), "tokens were lost"
    begin = min(answer.stamps[0] for answer in answers)
    end = max(answer.stamps[-1] for answer in answers)
    return StreamRound(count * tokens / (end - begin), median(answer.first_s for answer in answers))


@benchmark
def external(
    streams: int = 16,
    rate: Annotated[float, "Tokens a second of each stream."] = 40.0,
    tokens: Annotated[int, click.IntRange(2), "Of each stream."] = 200,
    rounds: int = 5,
) -> list[Figure]:
    """Compare streams from an engine itself with streams through a farm."""
    with engine(rate) as url:
        settings = msgspec.json.encode({"vllm": EngineSettings(url=url)}).decode()
        spec = build_spec(str(MODEL_DIR), name=MODEL, engine="vllm")
        with private_farm(spec, environment={VARIABLE: settings}) as farm:
            bare: list[StreamRound] = []
            whole: list[StreamRound] = []
            for index in range(rounds):
                for base, runs in ((Base.of(url), bare), (farm.base, whole)):
                    runs.append(asyncio.run(stream_all(base, streams, tokens)))
                say(f"round {index + 1}: {bare[-1]} {whole[-1]}")
    share = median(there.rate / here.rate for here, there in zip(bare, whole, strict=True))
    added = 1000 * median(there.first_s - here.first_s for here, there in zip(bare, whole, strict=True))
    return [
        Figure(f"throughput of {streams} streams beside a bare client", share, SHARE, "x", at_least=True),
        Figure("first token, added", added, FIRST_TOKEN_MS, "ms"),
    ]


if __name__ == "__main__":
    run(external)
