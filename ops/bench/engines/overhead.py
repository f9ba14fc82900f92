"""What Furrow costs beside an external engine: a scripted one at a fixed rate, asked by a client directly and through a
farm, in turns."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import msgspec

from control.listening import free_port
from control.operations.spec import build_spec
from ops.bench import program
from ops.bench.common.client import Base, request
from ops.bench.common.farm import HOST, private_farm, say
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.bench.common.summary import median
from ops.bench.engines import scripted
from ops.common.waiting import until
from ops.demo import MODEL_DIR
from ops.local.ready import is_ready
from worker.external.host import VARIABLE, EngineSettings

SHARE = 0.95
"""Of a bare client's throughput."""
FIRST_TOKEN_MS = 10.0
"""Beyond a bare client's."""
MODEL = "m"
PROMPT = list(range(3, 35))


@dataclass(frozen=True, slots=True)
class Run:
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
    command = [sys.executable, str(Path(scripted.__file__)), "vllm", "--host", HOST, "--port", str(port)]
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


async def streams(base: Base, count: int, tokens: int) -> Run:
    """So many streams of so many tokens at once."""
    ended = await asyncio.gather(*(stream(base, index, tokens) for index in range(count)))
    begin, end = min(one[1] for one in ended), max(one[2] for one in ended)
    assert all(one[3] == tokens for one in ended), f"tokens were lost: {[one[3] for one in ended]}"
    return Run(count * tokens / (end - begin), median([one[1] - one[0] for one in ended]))


async def stream(base: Base, index: int, tokens: int) -> tuple[float, float, float, int]:
    """When it was asked, when the first and the last token came, and their number."""
    body = {
        "model": MODEL,
        "prompt": [*PROMPT, 3 + index % 100],
        "max_tokens": tokens,
        "min_tokens": 0,
        "temperature": 0,
        "ignore_eos": True,
        "stop_token_ids": [],
        "stream": True,
        "return_token_ids": True,
    }
    asked = time.monotonic()
    first = last = 0.0
    count = 0
    headers = {"content-type": "application/json"}
    async with request(base, "POST", "/v1/completions", body=json.dumps(body).encode(), headers=headers) as response:
        assert response.status == 200, await response.read()
        async for event in response.events():
            if event.data == b"[DONE]":
                break
            for choice in json.loads(event.data)["choices"]:
                count += len(choice.get("token_ids") or [])
            last = time.monotonic()
            first = first or last
    return asked, first, last, count


@click.command()
@click.option("--streams", "count", type=click.IntRange(1), default=16, show_default=True)
@click.option("--rate", type=float, default=40.0, show_default=True, help="Tokens a second of each stream.")
@click.option("--tokens", type=click.IntRange(2), default=200, show_default=True, help="Of each stream.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
def overhead(count: int, rate: float, tokens: int, rounds: int) -> None:
    """Compare streams from an engine itself with streams through a farm."""
    click.echo(describe())
    with engine(rate) as url:
        named = msgspec.json.encode({"vllm": EngineSettings(url=url)}).decode()
        spec = build_spec(str(MODEL_DIR), name=MODEL, engine="vllm")
        with private_farm(spec, (1,), environment={VARIABLE: named}) as (farm, _, _):
            bare: list[Run] = []
            whole: list[Run] = []
            for index in range(rounds):
                for base, runs in ((Base.of(url), bare), (Base.of(farm), whole)):
                    runs.append(asyncio.run(streams(base, count, tokens)))
                say(f"round {index + 1}: {bare[-1]} {whole[-1]}")
    share = median([there.rate / here.rate for here, there in zip(bare, whole, strict=True)])
    added = 1000 * median([there.first_s - here.first_s for here, there in zip(bare, whole, strict=True)])
    conclude(
        [
            Figure(f"throughput of {count} streams beside a bare client", share, SHARE, "x", at_least=True),
            Figure("first token, added", added, FIRST_TOKEN_MS, "ms"),
        ]
    )


if __name__ == "__main__":
    program.run(overhead)
