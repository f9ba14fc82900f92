"""The time to the first token of a conversation's second turn beside that of its first, through the whole farm."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from control.operations.spec import build_spec
from ops.bench import program
from ops.bench.common.ask import kind_of
from ops.bench.common.client import Base, request
from ops.bench.common.farm import private_farm, say
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.bench.common.shapes import SHAPES

RATIO = 0.15
"""Of the first turn's time to its first token: what the second one may take."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`first_s` is from sending the request to its first token, at the client."""

    first_s: float
    cached: int


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="tiny", show_default=True, help="A random model.")
@click.option("--shared", type=click.IntRange(64), default=2000, show_default=True, help="Tokens of the first turn.")
@click.option("--new", type=click.IntRange(1), default=32, show_default=True, help="Tokens that the second one adds.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Conversations, one by one.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks.")
@click.option("--quant", help="As `furrow serve` takes it.")
@click.option("--prefix-cache/--no-prefix-cache", default=True, help="Without it the figure must be missed.")
def prefix(shape: str, shared: int, new: int, rounds: int, tp: int, quant: str | None, prefix_cache: bool) -> None:
    """Measure the time to the first token of a prompt that goes on after one that was answered before.

    The farm is private, with one CPU replica of a random model in float32. Each conversation is of other tokens.
    """
    if shared + new + 2 > SHAPES[shape]["max_position_embeddings"]:
        raise click.UsageError(f"{shared} + {new} tokens don't fit the context of {shape}; lower --shared")
    click.echo(describe())
    with tempfile.TemporaryDirectory(prefix="furrow-bench-") as folder:
        from ops.bench.common import random_model  # torch: not for a wrong option

        random_model.build(shape, Path(folder), "float32")
        spec = build_spec(
            folder, name="bench", tp=tp, devices="cpu", dtype="float32", quant=quant, prefix_cache=prefix_cache
        )
        say(f"starting a replica of {shape}")
        with private_farm(spec, (1,)) as (url, _, (model,)):
            turns = asyncio.run(measure(Base.of(url), model, SHAPES[shape]["vocab_size"], shared, new, rounds))
    first, second = ([pair[turn].first_s for pair in turns] for turn in (0, 1))
    click.echo(
        f"{shape}, {shared} tokens, then {new} more, {rounds} conversations: first token after "
        f"{1000 * statistics.median(first):.0f} ms and {1000 * statistics.median(second):.0f} ms"
    )
    least, most = min(pair[1].cached for pair in turns), max(pair[0].cached for pair in turns)
    conclude(
        [
            Figure("second turn's first token, of the first's", statistics.median(ratios(turns)), RATIO),
            Figure("tokens of the second turn's prompt cached", least, shared, at_least=True),
            Figure("tokens of the first turn's prompt cached", most, 0),
        ]
    )


def ratios(turns: list[tuple[Turn, Turn]]) -> list[float]:
    """Each conversation's second turn, as a share of its first."""
    return [second.first_s / first.first_s for first, second in turns]


async def measure(
    base: Base, model: str, vocabulary: int, shared: int, new: int, rounds: int
) -> list[tuple[Turn, Turn]]:
    """The turns of each conversation, after one that warms up."""
    chance = random.Random(0)
    turns: list[tuple[Turn, Turn]] = []
    for number in range(rounds + 1):
        prompt = [chance.randrange(vocabulary) for _ in range(shared + new)]
        first = await ask(base, model, prompt[:shared])
        second = await ask(base, model, prompt)
        if number:
            say(f"conversation {number}: {1000 * first.first_s:.0f} ms, {1000 * second.first_s:.0f} ms")
            turns.append((first, second))
    return turns


async def ask(base: Base, model: str, prompt: list[int]) -> Turn:
    """One streamed answer of two tokens. Raises ClickException where there is none."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,  # a token without text is an event too
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first, usage = None, None
    sent = time.perf_counter()
    headers = {"content-type": "application/json"}
    async with request(base, "POST", "/v1/completions", body=json.dumps(body).encode(), headers=headers) as response:
        if response.status != 200:
            raise click.ClickException(
                f"the farm answered {response.status}: {kind_of(json.loads(await response.read()))}"
            )
        async for _, data, _ in response.events():
            first = first or time.perf_counter()
            if data != b"[DONE]":
                usage = json.loads(data).get("usage") or usage
    if first is None or usage is None or usage["completion_tokens"] != 2:
        raise click.ClickException(f"an answer of two tokens was asked for; what came says {usage}")
    return Turn(first - sent, usage["prompt_tokens_details"]["cached_tokens"])


if __name__ == "__main__":
    program.run(prefix)
