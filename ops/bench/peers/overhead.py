"""The whole farm beside the bare engine loop on the same model, and the farm's calls to Redis."""

from __future__ import annotations

import os
from contextlib import ExitStack
from statistics import median
from typing import Annotated

import click

from control.errors import SettingsError
from ops.bench.peers.compare import row_of
from ops.bench.peers.engine import Engine, Failed, Setup, Unavailable
from ops.bench.peers.hosted import bare_loop
from ops.bench.peers.results import RunFigures, figures
from ops.bench.peers.runner import SLACK_TOKENS, WARM_UP_TOKENS, random_prompts, run_checked
from ops.bench.peers.served import FurrowFarm
from ops.bench.peers.weights import FILES
from ops.harness.farm import say
from ops.harness.models import SHAPES
from ops.harness.program import Figure, ModelsFolder, Shape, benchmark, models_of, run

LEAST_ALONE = 0.97
LEAST = 0.92
"""Of the bare loop's rate that the farm is to reach, with one stream and with several."""


@benchmark
def overhead(
    shape: Shape = "qwen3-0.6b",
    weights: Annotated[str, "As of `furrow bench compare`."] = "f32",
    streams: tuple[int, ...] = (1, 8),
    prompt: Annotated[int, "Prompt tokens."] = 64,
    tokens: Annotated[int, click.IntRange(2), "New tokens of each stream."] = 64,
    rounds: Annotated[int, "Taken in turns."] = 5,
    device: Annotated[str, "cpu or cuda:0."] = "cpu",
    folder: ModelsFolder = None,
) -> list[Figure]:
    """Load the model twice, in a farm and in a bare loop, and let them decode in turns; exit status 1 below the limit.

    The one that waits does nothing but send heartbeats.
    """
    row_of(f"furrow-farm:{weights}")
    click.echo(f"{shape}, {weights}: prompt {prompt}, {tokens} new tokens, {rounds} rounds, medians")
    most = max(streams)
    with ExitStack() as stack:
        models = stack.enter_context(models_of(shape, folder, "float32" if device == "cpu" else "bfloat16"))
        setup = Setup(
            models.checkpoint(),
            weights,
            gguf=models.gguf(weights) if weights in FILES else None,
            device=device,
            threads=len(os.sched_getaffinity(0)),
            streams=most,
            context=prompt + tokens,
            kv_tokens=most * (prompt + tokens + SLACK_TOKENS),
        )
        loop = bare_loop(setup)
        farm = FurrowFarm(setup)
        try:
            for engine in (loop, farm):
                stack.callback(engine.stop)
                engine.start()
            vocabulary = SHAPES[shape]["vocab_size"]
            figures = [beside(loop, farm, count, prompt, tokens, rounds, vocabulary) for count in streams]
        except (Unavailable, Failed) as why:
            raise SettingsError(f"can't be measured: {why}") from why
    return figures


def beside(
    loop: Engine, farm: FurrowFarm, count: int, prompt: int, tokens: int, rounds: int, vocabulary: int
) -> Figure:
    """Both in turns with so many streams; prints what they did and the farm's traffic. Returns the ratio."""
    pairs: list[tuple[RunFigures, RunFigures]] = []
    per_round: list[dict[str, float]] = []
    for turn in range(rounds + 1):
        say(f"{count} streams, " + (f"round {turn} of {rounds}" if turn else "warming up"))
        prompts = random_prompts(f"{turn} {count}", count, prompt, vocabulary)
        length = tokens if turn else WARM_UP_TOKENS
        bare = run_checked(loop, prompts, length)
        # Commands are known once the farm is at rest; what Redis does until then is not counted.
        commands = farm.commands()
        before = farm.traffic()
        whole = run_checked(farm, prompts, length)
        after = farm.traffic()
        if turn:
            pairs.append((figures(whole), figures(bare)))
            per_round.append(
                {**{name: after[name] - before[name] for name in after}, "commands": farm.commands() - commands}
            )
    ratio = median([farm_did.decode / loop_did.decode for farm_did, loop_did in pairs])
    rates = [median([pair[side].decode for pair in pairs]) for side in (0, 1)]
    click.echo(f"{count} streams: farm {rates[0]:.1f} tok/s, bare loop {rates[1]:.1f} tok/s")
    click.echo(
        f"  Redis, {_per(per_round, 'commands', 1)} a command of the leader; "
        f"{_per(per_round, None, count * tokens)} a token"
    )
    return Figure(f"{count} streams: farm / bare loop", ratio, LEAST_ALONE if count == 1 else LEAST, at_least=True)


def _per(per_round: list[dict[str, float]], unit: str | None, count: int) -> str:
    """Medians over rounds of what was sent and moved, per `unit` or by `count`. Raises Failed where there was none."""
    totals = [traffic[unit] if unit else count for traffic in per_round]
    if not all(totals):
        raise Failed("the leader told of no command")
    sent, commands, moved = (
        median([sum(traffic[name] for name in names) / total for traffic, total in zip(per_round, totals, strict=True)])
        for names in (("sent",), ("all",), ("in", "out"))
    )
    return f"{sent:.1f} commands sent and {commands:.0f} run, {moved:.0f} bytes"


if __name__ == "__main__":
    run(overhead)
