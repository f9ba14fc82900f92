"""Streams on a real external engine whose process, then whose leader is killed: 64 at once, beside the same streams
without a kill. With scripted engines `tests/acceptance/test_engines.py` does so."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click
import psutil

from control.engines import ENGINES, parse_arguments
from control.operations.spec import build_spec
from control.redis.connection import connect
from control.replicas import health
from ops.bench import program
from ops.bench.common.client import Base, request
from ops.bench.common.farm import private_farm, say
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.common.engine_options import engine_environment, engine_options
from ops.common.waiting import until
from ops.demo import MODEL_DIR

MODEL = "m"
REPLICA = "r0"
ENGINE_PROCESS = "furrow-engine"
"""Name of the process that leads an engine's group."""
LIMIT_S = 600.0
"""Of all streams: a large engine takes minutes to start."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream as its client got it."""

    tokens: tuple[int, ...]
    finish: str
    counted: int
    """Completion tokens of its usage."""


async def stream(base: Base, index: int, tokens: int) -> Stream:
    """A greedy answer that ends at its limit."""
    body = {
        "model": MODEL,
        "prompt": f"Count from {index} to {index + 40}. {index},",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    got: list[int] = []
    finish = "none"
    counted = 0
    headers = {"content-type": "application/json"}
    async with request(base, "POST", "/v1/completions", body=json.dumps(body).encode(), headers=headers) as response:
        if response.status != 200:
            return Stream((), (await response.read()).decode(), 0)
        async for event in response.events():
            if event.data == b"[DONE]":
                break
            answer: dict[str, Any] = json.loads(event.data)
            if "error" in answer:
                finish = answer["error"]["message"]
            for choice in answer.get("choices", ()):
                got += choice.get("token_ids") or []
                finish = choice.get("finish_reason") or finish
            counted = (answer.get("usage") or {}).get("completion_tokens", counted)
    return Stream(tuple(got), finish, counted)


async def streams(base: Base, count: int, tokens: int, strike: Callable[[], None] | None) -> list[Stream]:
    """So many streams at once; `strike` once they run."""
    running = [asyncio.ensure_future(stream(base, index, tokens)) for index in range(count)]
    if strike is not None:
        await asyncio.to_thread(strike)
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*running)


class Strikes:
    """The processes of the farm's one replica."""

    def __init__(self, redis_url: str) -> None:
        self._client = connect(redis_url)

    def await_streams(self) -> None:
        """Return once the leader has brought tokens of the streams."""
        before = self._leader().tokens
        until(lambda: self._leader().tokens > before, "the streams run", 60.0)

    def kill_engine(self) -> None:
        """The engine itself, not the process that leads its group."""
        self.await_streams()
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if process.name() == ENGINE_PROCESS:
                    for child in process.children():
                        child.kill()

    def kill_leader(self) -> None:
        self.await_streams()
        os.kill(self._leader().pid, signal.SIGKILL)

    def _leader(self) -> health.Beat:
        def beat() -> health.Beat | None:
            return health.heartbeats(self._client, MODEL, REPLICA, 1)[0]

        return until(beat, "the leader has a heartbeat", 60.0)


@click.command()
@click.option(
    "--engine", type=click.Choice(list(ENGINES)), default="vllm", show_default=True, help="The engine to kill."
)
@click.option("--source", default=str(MODEL_DIR), help="Folder or GGUF file of the model.  [default: demo]")
@click.option("--streams", "count", type=click.IntRange(1), default=64, show_default=True)
@click.option("--tokens", type=click.IntRange(8), default=150, show_default=True, help="Of each stream.")
@click.option("--engine-arg", "arguments", multiple=True, metavar="NAME=VALUE", help="Option of the engine.")
@click.option("--max-context", type=int, help="Positions of a sequence.")
@engine_options
def survival(
    engine: str,
    source: str,
    count: int,
    tokens: int,
    arguments: Sequence[str],
    max_context: int | None,
    **offered: Sequence[str],
) -> None:
    """Kill an engine, then its leader, under streams, and compare each stream with an undisturbed one."""
    click.echo(describe())
    environment = engine_environment(**offered)
    spec = build_spec(
        source, name=MODEL, engine=engine, engine_args=parse_arguments(arguments), max_context=max_context
    )
    figures: list[Figure] = []
    with private_farm(spec, (1,), environment=environment) as (url, redis_url, _):
        strikes = Strikes(redis_url)
        base = Base.of(url)
        asyncio.run(streams(base, 1, 8, None))
        undisturbed = asyncio.run(streams(base, count, tokens, None))
        again = asyncio.run(streams(base, count, tokens, None))
        alike = sum(one == other for one, other in zip(undisturbed, again, strict=True))
        say(f"{alike} of {count} streams are the same without a kill")
        for victim, strike in (("engine", strikes.kill_engine), ("leader", strikes.kill_leader)):
            began = time.monotonic()
            struck = asyncio.run(streams(base, count, tokens, strike))
            seconds = time.monotonic() - began
            whole = sum(
                one.finish == "length" and len(one.tokens) == tokens and one.counted == tokens for one in struck
            )
            same = sum(one.tokens == other.tokens for one, other in zip(struck, undisturbed, strict=True))
            say(f"{victim} killed: all ended after {seconds:.1f} s; {same} of {count} equal the undisturbed run")
            for one in struck:
                if one.finish != "length":
                    say(f"a stream ended with {len(one.tokens)} tokens: {one.finish}")
            figures.append(Figure(f"whole streams of {count}, {victim} killed", whole, count, "", at_least=True))
    conclude(figures)


if __name__ == "__main__":
    program.run(survival)
