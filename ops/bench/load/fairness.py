"""`furrow bench fairness`: one heavy user beside nine light ones, all with a backlog; what each is served.

And how long a small request waits beside users that take all there is: see hogs.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import click

from control.errors import FurrowError
from control.messages import ModelSpec
from control.redis.connection import connect_async
from ops.bench.common.ask import Answer, ask, now_ms
from ops.bench.common.client import Base
from ops.bench.common.farm import NOBODY_REFUSED, private_farm, say
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.bench.common.prompts import prompt
from ops.bench.load.hogs import beside_hogs
from ops.bench.load.stamps import StampCollector
from ops.demo import MODEL_DIR

MODEL = "demo"
LIGHTS = 9
HEAVY, NEWCOMER = "heavy", "newcomer"
SHARE = 0.9
"""At least so much of an equal share."""
TAIL_S = 5.0
"""The load goes on for so long after the last window: what ran in it can end, and is counted."""


@dataclass(frozen=True)
class User:
    """Keeps `clients` requests on their way at any time; each ends after `max_tokens`."""

    name: str
    clients: int
    max_tokens: int
    prompt_bytes: int


@dataclass(frozen=True)
class Window:
    """A span of time, ms since 1970."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1000


@dataclass(frozen=True)
class Load:
    """The answers, the stamps of each by its rid, and the windows that count."""

    answers: list[Answer]
    stamps: dict[str, dict[str, float]]
    windows: list[Window]


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Duration of each of the two measured windows.")
@click.option("--settle", default=10.0, show_default=True, help="Seconds from an arrival to its window.")
@click.option(
    "--kv-tokens", default=1024, show_default=True, help="Tokens of KV memory, which limits the running requests."
)
@click.option("--backlog", default=6, show_default=True, help="Requests in flight of each light user.")
@click.option("--hog-requests", default=45, show_default=True, help="Requests that a hog sends at once; 0: no hogs.")
@click.option("--hog-choices", default=128, show_default=True, help="Choices of each of these requests.")
@click.option("--times", default=20, show_default=True, help="Small requests beside each hog, one at a time.")
def fairness(
    seconds: float, settle: float, kv_tokens: int, backlog: int, hog_requests: int, hog_choices: int, times: int
) -> None:
    """Measure the shares of users on a private farm (demo, one CPU rank).

    A heavy user begins alone; nine light ones come, then one more. Each is a bearer token. A share counts prompt and
    generated tokens. The heavy user has ten times as many requests in flight as a light one, and longer ones. With
    --seconds 0 this part is left out.

    The second part times small requests beside hogs: users who send more choices, longer answers or longer prompts than
    the leader has places or memory for. The first token must come within 2 s.
    """
    click.echo(describe())
    figures = by_turns(seconds, settle, kv_tokens, backlog) if seconds else []
    if hog_requests:
        spec = ModelSpec(name=MODEL, source=str(MODEL_DIR), devices=["cpu"])
        figures += beside_hogs(spec, hog_requests, hog_choices, times)
    conclude(figures)


def by_turns(seconds: float, settle: float, kv_tokens: int, backlog: int) -> list[Figure]:
    """Measure the tokens that each user is served. Raises FurrowError."""
    spec = ModelSpec(name=MODEL, source=str(MODEL_DIR), devices=["cpu"], kv_tokens=kv_tokens)
    # The backlog is the point here, so nobody is refused for it.
    with private_farm(spec, (1,), *NOBODY_REFUSED) as (url, redis_url, _):
        load = asyncio.run(drive(Base.of(url), redis_url, seconds, settle, backlog))
    failed = [answer.error for answer in load.answers if answer.error is not None]
    figures = [Figure("requests that failed", len(failed), 0)]
    for title, window, count in zip(("ten users", "with a newcomer"), load.windows, (10, 11), strict=True):
        rates = tokens_per_second(load.answers, load.stamps, window)
        equal = sum(rates.values()) / count
        click.echo(f"{title}: {window.seconds:.0f} s, {sum(rates.values()):.0f} tok/s, equal share {equal:.1f} tok/s")
        for name in sorted(rates):
            click.echo(f"  {name:<12}{rates[name]:>8.1f} tok/s{100 * rates[name] / equal:>8.0f} %")
        light = [rate for name, rate in rates.items() if name != HEAVY]
        figures += [
            Figure(f"{title}: users served at all", len(rates), count, at_least=True),
            Figure(f"{title}: least of a light user", 100 * min(light) / equal, 100 * SHARE, "%", at_least=True),
            Figure(f"{title}: most of a light user", 100 * max(light) / equal, 100 * (2 - SHARE), "%"),
        ]
    return figures


async def drive(base: Base, redis_url: str, seconds: float, settle: float, backlog: int) -> Load:
    """Let the users come, and go on until both windows are over. Raises FurrowError."""
    client = connect_async(redis_url)
    collector, over = StampCollector(client), asyncio.Event()
    answers, windows, turns = list[Answer](), list[Window](), itertools.count()

    async def keep_asking(user: User) -> None:
        for turn in turns:
            text = prompt(turn, user.prompt_bytes)
            answer = await ask(base, user.name, MODEL, text, user.max_tokens, stream=False)
            answers.append(answer)
            if answer.error is None:
                collector.add(answer)

    try:
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(collector.run(over))

            def arrive(user: User) -> list[asyncio.Task[None]]:
                return [tasks.create_task(keep_asking(user)) for _ in range(user.clients)]

            running = arrive(User(HEAVY, 10 * backlog, max_tokens=64, prompt_bytes=192))
            await asyncio.sleep(settle)
            for index in range(LIGHTS):
                running += arrive(User(f"light-{index + 1}", backlog, max_tokens=32, prompt_bytes=48))
            windows.append(await measure("ten users", settle, seconds))
            running += arrive(User(NEWCOMER, backlog, max_tokens=32, prompt_bytes=48))
            windows.append(await measure("with a newcomer", settle, seconds))
            await asyncio.sleep(TAIL_S)
            for task in running:
                task.cancel()
            over.set()
            await collecting
    except* FurrowError as group:
        raise group.exceptions[0] from group
    finally:
        await client.aclose()
    return Load(answers, collector.found, windows)


async def measure(title: str, settle: float, seconds: float) -> Window:
    """Let the load settle and pass a window's time."""
    await asyncio.sleep(settle)
    say(f"{title}: measuring")
    begin = now_ms()
    await asyncio.sleep(seconds)
    return Window(begin, now_ms())


def tokens_per_second(
    answers: Iterable[Answer], stamps: Mapping[str, Mapping[str, float]], window: Window
) -> dict[str, float]:
    """User → prompt and generated tokens that were worked on in the window, per second.

    A prompt counts at its claim, generated tokens evenly from the first to the last.
    """
    served: dict[str, float] = defaultdict(float)
    for answer in answers:
        times = stamps.get(answer.rid)
        if times is None or not {"t_claimed", "t_first", "t_last"} <= times.keys():
            continue
        if window.begin <= times["t_claimed"] < window.end:
            served[answer.user] += answer.prompt_tokens
        first, last = times["t_first"], max(times["t_last"], times["t_first"] + 1)
        inside = max(0.0, min(last, window.end) - max(first, window.begin))
        served[answer.user] += answer.tokens * inside / (last - first)
    return {user: tokens / window.seconds for user, tokens in served.items() if tokens}
