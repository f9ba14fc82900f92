"""The time to the first token of a conversation's second turn beside that of its first, through the whole farm."""

from __future__ import annotations

import asyncio
import random
from statistics import median
from typing import Annotated, Any

import click

from control.operations.desired import build_spec
from ops.harness.client import Answer, Base, ask, completion
from ops.harness.farm import private_farm, say
from ops.harness.models import SHAPES
from ops.harness.program import Figure, Quant, Shape, benchmark, models_of, run

RATIO = 0.15
"""Of the first turn's time to its first token: what the second one may take."""


@benchmark
def prefix(
    shape: Shape = "tiny",
    shared: Annotated[int, click.IntRange(64), "Tokens of the first turn."] = 2000,
    new: Annotated[int, "Tokens that the second one adds."] = 32,
    rounds: Annotated[int, "Conversations, one by one."] = 5,
    tp: Annotated[int, "Ranks."] = 1,
    quant: Quant = None,
    prefix_cache: Annotated[bool, "Without it the figure must be missed."] = True,
) -> list[Figure]:
    """Measure the time to the first token of a prompt that goes on after one that was answered before.

    The farm is private, with one CPU replica of a random model in float32. Each conversation is of other tokens.
    """
    if shared + new + 2 > SHAPES[shape]["max_position_embeddings"]:
        raise click.UsageError(f"{shared} + {new} tokens don't fit the context of {shape}; lower --shared")
    with models_of(shape) as models:
        more: dict[str, Any] = {"dtype": "float32", "quant": quant, "prefix_cache": prefix_cache}
        spec = build_spec(str(models.checkpoint()), name="bench", tp=tp, devices="cpu", **more)
        say(f"starting a replica of {shape}")
        with private_farm(spec) as farm:
            turns = asyncio.run(measure(farm.base, SHAPES[shape]["vocab_size"], shared, new, rounds))
    first, second = (1000 * median(pair[turn].first_s for pair in turns) for turn in (0, 1))
    click.echo(
        f"{shape}, {shared} tokens, then {new} more, {rounds} conversations: first token after "
        f"{first:.0f} ms and {second:.0f} ms"
    )
    ratio = median(two.first_s / one.first_s for one, two in turns)
    least = min(two.cached_tokens for _, two in turns)
    most = max(one.cached_tokens for one, _ in turns)
    return [
        Figure("second turn's first token, of the first's", ratio, RATIO),
        Figure("tokens of the second turn's prompt cached", least, shared, at_least=True),
        Figure("tokens of the first turn's prompt cached", most, 0),
    ]


async def measure(base: Base, vocabulary: int, shared: int, new: int, rounds: int) -> list[tuple[Answer, Answer]]:
    """The turns of each conversation, after one that warms up. Raises RequestFailed."""
    chance = random.Random(0)
    turns: list[tuple[Answer, Answer]] = []
    for number in range(rounds + 1):
        prompt = [chance.randrange(vocabulary) for _ in range(shared + new)]
        # With log probabilities a token without text is an event too.
        bodies = [completion("bench", part, 2, logprobs=0) for part in (prompt[:shared], prompt)]
        first, second = [(await ask(base, body)).check() for body in bodies]
        if number:
            say(f"conversation {number}: {1000 * first.first_s:.0f} ms, {1000 * second.first_s:.0f} ms")
            turns.append((first, second))
    return turns


if __name__ == "__main__":
    run(prefix)
