"""Part of `furrow bench fairness`: how long a small request waits for its first token beside users who take all."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import click

from control.messages import ModelSpec
from control.redis.connection import connect
from control.requests import open_requests
from ops.bench.common.ask import Answer, ask
from ops.bench.common.client import Base
from ops.bench.common.farm import NOBODY_REFUSED, private_farm, say
from ops.bench.common.figures import Figure
from ops.bench.common.prompts import prompt
from ops.bench.common.summary import summarise
from ops.common.waiting import until

LIMIT_MS = 2000.0
OTHER = "other"
TOKENS = 2
"""Of each answer that is measured."""
TAKE_S = 3.0
"""From a hog's first token on it takes what it can for so long, before anything is measured."""
PATIENCE_S = 120.0
POLL_S = 0.2
MOST = 1000


@dataclass(frozen=True)
class Hog:
    """Sends all its requests at once and waits for none."""

    user: str
    """A bearer token; "" for none."""
    requests: int
    choices: int
    prompt_bytes: int
    max_tokens: int


@dataclass(frozen=True)
class Scene:
    """The heavy users, and the classes in which the other user asks meanwhile."""

    title: str
    hogs: tuple[Hog, ...]
    priorities: tuple[str, ...] = ("normal",)


def scenes(requests: int, choices: int) -> list[Scene]:
    many = Hog("hog", requests, choices, 48, 2000)
    return [
        Scene(f"{requests} requests of {choices} choices", (many,), ("high", "normal", "low")),
        Scene("the same without a key", (Hog("", requests, choices, 48, 2000),)),
        Scene("two such hogs", (many, Hog("second", requests, choices, 48, 2000))),
        Scene("long answers, all memory", (Hog("hog", 300, 1, 800, 12_000),)),
        Scene("long prompts", (Hog("hog", 300, 1, 12_000, 200),)),
    ]


def beside_hogs(spec: ModelSpec, requests: int, choices: int, times: int) -> list[Figure]:
    """Run every scene on one private farm. Raises FurrowError."""
    figures, failed = list[Figure](), 0
    with private_farm(spec, (1,), *NOBODY_REFUSED) as (url, redis_url, _):
        for scene in scenes(requests, choices):
            say(f"{scene.title}: measuring")
            found, lost = asyncio.run(play(scene, Base.of(url), redis_url, spec.name, times))
            figures, failed = figures + found, failed + lost
    return [*figures, Figure("small requests that failed, or had no hog", failed, 0)]


async def play(scene: Scene, base: Base, redis_url: str, model: str, times: int) -> tuple[list[Figure], int]:
    """Let the hogs come, measure the other one's answers one after the other, and let the hogs leave.

    The figures, and how many answers failed or came while a hog had ended.
    """
    turns, running = itertools.count(), list[asyncio.Task[Answer]]()
    client = connect(redis_url)

    def begun() -> bool:
        return any(one.completion_tokens for one in open_requests(client, [model], MOST))

    def over() -> bool:
        return not open_requests(client, [model], MOST)

    try:
        for hog in scene.hogs:
            for _ in range(hog.requests):
                text = prompt(next(turns), hog.prompt_bytes)
                asked = ask(base, hog.user, model, text, hog.max_tokens, stream=False, n=hog.choices)
                running.append(asyncio.create_task(asked))
        await asyncio.to_thread(until, begun, "a token of the heavy load", PATIENCE_S, POLL_S)
        await asyncio.sleep(TAKE_S)
        figures, failed = list[Figure](), 0
        for priority in scene.priorities:
            answers = list[Answer]()
            for _ in range(times):
                text = prompt(next(turns), 48)
                answers.append(await ask(base, OTHER, model, text, TOKENS, stream=True, priority=priority))
            figures.append(first_tokens(f"{scene.title}, {priority}", answers))
            failed += sum(answer.error is not None for answer in answers)
        return figures, failed + sum(task.done() for task in running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(until, over, "the end of the heavy load", PATIENCE_S, POLL_S)
        client.close()


def first_tokens(title: str, answers: list[Answer]) -> Figure:
    """The slowest of them."""
    waits = [answer.first_ms - answer.sent_ms for answer in answers if answer.first_ms is not None]
    if waits:
        summary = summarise(waits)
        click.echo(f"{title}: first token p50 {summary.p50:.0f} ms, max {summary.max:.0f} ms of {summary.count}")
    return Figure(f"{title}: first token", max(waits, default=float("inf")), LIMIT_MS, "ms")
