"""Streams on a real external engine whose process, then whose leader is killed: 64 at once, beside the same streams
without a kill. With scripted engines `tests/acceptance/test_engines.py` does so."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

import click
import psutil

from control.engines import ENGINES, parse_arguments
from control.operations.spec import build_spec
from control.redis.clients import SyncRedis
from control.replicas import health
from ops.common.engine_options import engine_environment, engine_options
from ops.common.waiting import until
from ops.demo import MODEL_DIR
from ops.harness.client import Answer, Base, ask, completion
from ops.harness.farm import private_farm, say
from ops.harness.program import Figure, benchmark, run

MODEL = "m"
REPLICA = "r0"
ENGINE_PROCESS = "furrow-engine"
"""Name of the process that leads an engine's group."""


async def stream_all(base: Base, count: int, tokens: int, strike: Callable[[], None] | None) -> list[Answer]:
    """So many greedy streams at once, which end at their limit; `strike` once they run."""
    prompts = [f"Count from {index} to {index + 40}. {index}," for index in range(count)]
    bodies = [completion(MODEL, prompt, tokens, return_token_ids=True) for prompt in prompts]
    running = [asyncio.ensure_future(ask(base, body)) for body in bodies]
    if strike is not None:
        await asyncio.to_thread(strike)
    return await asyncio.gather(*running)


def count_equal(answers: Sequence[Answer], expected: Sequence[Answer]) -> int:
    """Answers with the tokens that are expected."""
    return sum(answer.token_ids == other.token_ids for answer, other in zip(answers, expected, strict=True))


class Strikes:
    """The processes of the farm's one replica."""

    def __init__(self, client: SyncRedis) -> None:
        self._client = client

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


@benchmark
@engine_options
def survival(
    engine: Annotated[str, click.Choice(list(ENGINES)), "The engine to kill."] = "vllm",
    source: Annotated[str, "Folder or GGUF file of the model.  [default: demo]"] = str(MODEL_DIR),
    streams: int = 64,
    tokens: Annotated[int, click.IntRange(8), "Of each stream."] = 150,
    arguments: Annotated[tuple[str, ...], "--engine-arg", {"metavar": "NAME=VALUE"}, "Option of the engine."] = (),
    max_context: Annotated[int | None, int, "Positions of a sequence."] = None,
    **engines: Sequence[str],
) -> list[Figure]:
    """Kill an engine, then its leader, under streams, and compare each stream with an undisturbed one."""
    environment = engine_environment(**engines)
    spec = build_spec(
        source, name=MODEL, engine=engine, engine_args=parse_arguments(arguments), max_context=max_context
    )
    figures: list[Figure] = []
    with private_farm(spec, environment=environment) as farm:
        strikes = Strikes(farm.client)
        base = farm.base
        asyncio.run(stream_all(base, 1, 8, None))
        undisturbed = asyncio.run(stream_all(base, streams, tokens, None))
        again = asyncio.run(stream_all(base, streams, tokens, None))
        alike = count_equal(again, undisturbed)
        say(f"{alike} of {streams} streams are the same without a kill")
        for victim, strike in (("engine", strikes.kill_engine), ("leader", strikes.kill_leader)):
            began = time.monotonic()
            answers = asyncio.run(stream_all(base, streams, tokens, strike))
            seconds = time.monotonic() - began
            whole = sum(
                answer.error is None and answer.finish == "length" and len(answer.token_ids) == tokens
                for answer in answers
            )
            same = count_equal(answers, undisturbed)
            say(f"{victim} killed: all ended after {seconds:.1f} s; {same} of {streams} equal the undisturbed run")
            for answer in answers:
                if answer.finish != "length":
                    say(f"a stream ended with {len(answer.token_ids)} tokens: {answer.error or answer.finish}")
            figures.append(Figure(f"whole streams of {streams}, {victim} killed", whole, streams, at_least=True))
    return figures


if __name__ == "__main__":
    run(survival)
