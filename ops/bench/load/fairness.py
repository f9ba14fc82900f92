"""`furrow bench fairness`: one heavy user beside nine light ones, all with a backlog, and what each is served; then
small requests beside users that take all there is, and how long their first tokens take."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import click

from control.errors import FurrowError
from control.redis.connection import connect_async
from control.requests import open_requests
from ops.bench.load.load import StampCollector
from ops.common.waiting import until
from ops.harness.client import Answer, ask, chat, now_ms, prompt
from ops.harness.farm import DEMO, NOBODY_REFUSED, PrivateFarm, demo_spec, private_farm, say
from ops.harness.program import Figure, benchmark, summarise

LIGHTS = 9
HEAVY = "heavy"
NEWCOMER = "newcomer"
SHARE = 0.9
"""At least so much of an equal share."""
TAIL_S = 5.0
"""The load goes on for so long after the last window: what ran in it can end, and is counted."""
FIRST_TOKEN_MS = 2000.0
"""Limit of a small request beside hogs."""
TAKE_S = 3.0
"""From a hog's first token on it takes what it can for so long, before anything is measured."""
PATIENCE_S = 120.0


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
class UserAnswers:
    """The answers, the stamps of each by its rid, and the windows that count."""

    answers: list[Answer]
    stamps: dict[str, dict[str, float]]
    windows: list[Window]


@benchmark
def fairness(
    seconds: Annotated[float, "Duration of each of the two measured windows."] = 60.0,
    settle: Annotated[float, "Seconds from an arrival to its window."] = 10.0,
    kv_tokens: Annotated[int, "Tokens of KV memory, which limits the running requests."] = 1024,
    backlog: Annotated[int, "Requests in flight of each light user."] = 6,
    hog_requests: Annotated[int, int, "Requests that a hog sends at once; 0: no hogs."] = 45,
    hog_choices: Annotated[int, "Choices of each of these requests."] = 128,
    times: Annotated[int, "Small requests beside each hog, one at a time."] = 20,
) -> list[Figure]:
    """Measure the shares of users on a private farm (demo, one CPU rank).

    A heavy user begins alone; nine light ones come, then one more. Each is a bearer token. A share counts prompt and
    generated tokens. The heavy user has ten times as many requests in flight as a light one, and longer ones. With
    --seconds 0 this part is left out.

    The second part times small requests beside hogs: users who send more choices, longer answers or longer prompts than
    the leader has places or memory for. The first token must come within 2 s.
    """
    figures = shares(seconds, settle, kv_tokens, backlog) if seconds else []
    return figures + beside_hogs(hog_requests, hog_choices, times) if hog_requests else figures


# --- shares -----------------------------------------------------------------------------------------------------------


def shares(seconds: float, settle: float, kv_tokens: int, backlog: int) -> list[Figure]:
    """Measure the tokens that each user is served. Raises FurrowError."""
    # The backlog is the point here, so nobody is refused for it.
    with private_farm(demo_spec(kv_tokens=kv_tokens), *NOBODY_REFUSED) as farm:
        load = asyncio.run(drive(farm, seconds, settle, backlog))
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


async def drive(farm: PrivateFarm, seconds: float, settle: float, backlog: int) -> UserAnswers:
    """Let the users come, and go on until both windows are over. Raises FurrowError."""
    client = connect_async(farm.redis_url)
    collector = StampCollector(client)
    complete = asyncio.Event()
    answers = list[Answer]()
    windows = list[Window]()
    turns = itertools.count()

    async def keep_asking(user: User) -> None:
        for turn in turns:
            body = chat(DEMO, prompt(turn, user.prompt_bytes), user.max_tokens, stream=False)
            answer = await ask(farm.base, body, user=user.name)
            answers.append(answer)
            if answer.error is None:
                collector.add(answer)

    async def measure(title: str) -> None:
        await asyncio.sleep(settle)
        say(f"{title}: measuring")
        begin = now_ms()
        await asyncio.sleep(seconds)
        windows.append(Window(begin, now_ms()))

    try:
        async with asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(collector.run(complete))

            def arrive(user: User) -> list[asyncio.Task[None]]:
                return [tasks.create_task(keep_asking(user)) for _ in range(user.clients)]

            running = arrive(User(HEAVY, 10 * backlog, max_tokens=64, prompt_bytes=192))
            await asyncio.sleep(settle)
            for index in range(LIGHTS):
                running += arrive(User(f"light-{index + 1}", backlog, max_tokens=32, prompt_bytes=48))
            await measure("ten users")
            running += arrive(User(NEWCOMER, backlog, max_tokens=32, prompt_bytes=48))
            await measure("with a newcomer")
            await asyncio.sleep(TAIL_S)
            for task in running:
                task.cancel()
            complete.set()
            await collecting
    except* FurrowError as group:
        raise group.exceptions[0] from group
    finally:
        await client.aclose()
    return UserAnswers(answers, collector.stamps, windows)


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
        first = times["t_first"]
        last = max(times["t_last"], times["t_first"] + 1)
        inside = max(0.0, min(last, window.end) - max(first, window.begin))
        served[answer.user] += answer.tokens * inside / (last - first)
    return {user: tokens / window.seconds for user, tokens in served.items() if tokens}


# --- hogs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hog:
    """Sends all its requests at once and waits for none. `user` is a bearer token; "" for none."""

    user: str
    requests: int
    choices: int
    prompt_bytes: int
    max_tokens: int


@dataclass(frozen=True)
class HogScene:
    """The heavy users, and the classes in which the other user asks meanwhile."""

    title: str
    hogs: tuple[Hog, ...]
    priorities: tuple[str, ...] = ("normal",)


def scenes(requests: int, choices: int) -> list[HogScene]:
    many = Hog("hog", requests, choices, 48, 2000)
    return [
        HogScene(f"{requests} requests of {choices} choices", (many,), ("high", "normal", "low")),
        HogScene("the same without a key", (Hog("", requests, choices, 48, 2000),)),
        HogScene("two such hogs", (many, Hog("second", requests, choices, 48, 2000))),
        HogScene("long answers, all memory", (Hog("hog", 300, 1, 800, 12_000),)),
        HogScene("long prompts", (Hog("hog", 300, 1, 12_000, 200),)),
    ]


def beside_hogs(requests: int, choices: int, times: int) -> list[Figure]:
    """Run every scene on one private farm. Raises FurrowError."""
    figures = list[Figure]()
    failed = 0
    with private_farm(demo_spec(), *NOBODY_REFUSED) as farm:
        for scene in scenes(requests, choices):
            say(f"{scene.title}: measuring")
            answers, invalid = asyncio.run(play(scene, farm, times))
            figures += [first_tokens(f"{scene.title}, {priority}", of) for priority, of in answers.items()]
            failed += invalid + sum(answer.error is not None for of in answers.values() for answer in of)
    return [*figures, Figure("small requests that failed, or had no hog", failed, 0)]


async def play(scene: HogScene, farm: PrivateFarm, times: int) -> tuple[dict[str, list[Answer]], int]:
    """Let the hogs come, measure the other one's answers one after the other, and let the hogs leave.

    The answers by class, and how many of them came when every request of the hogs had ended, or of the hogs' requests
    failed.
    """
    turns = itertools.count()
    running = list[asyncio.Task[Answer]]()
    client = farm.client

    def under_way() -> bool:
        return any(request.completion_tokens for request in open_requests(client, [DEMO], 1000))

    try:
        for hog in scene.hogs:
            for _ in range(hog.requests):
                body = chat(DEMO, prompt(next(turns), hog.prompt_bytes), hog.max_tokens, stream=False, n=hog.choices)
                running.append(asyncio.create_task(ask(farm.base, body, user=hog.user)))
        await asyncio.to_thread(until, under_way, "a token of the heavy load", PATIENCE_S, 0.2)
        await asyncio.sleep(TAKE_S)
        answers: dict[str, list[Answer]] = {}
        alone = 0
        for priority in scene.priorities:
            answers[priority] = []
            for _ in range(times):
                body = chat(DEMO, prompt(next(turns), 48), 2, priority=priority)
                answers[priority].append(await ask(farm.base, body, user="other"))
                alone += all(task.done() for task in running)
        failed = sum(task.done() and task.result().error is not None for task in running)
        return answers, alone + failed
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        event = "the end of the heavy load"
        await asyncio.to_thread(until, lambda: not open_requests(client, [DEMO], 1000), event, PATIENCE_S, 0.2)


def first_tokens(title: str, answers: list[Answer]) -> Figure:
    """The slowest first token of the answers."""
    waits = [answer.first_ms - answer.sent_ms for answer in answers if answer.first_ms is not None]
    if waits:
        summary = summarise(waits)
        click.echo(f"{title}: first token p50 {summary.p50:.0f} ms, max {summary.max:.0f} ms of {summary.count}")
    return Figure(f"{title}: first token", max(waits, default=float("inf")), FIRST_TOKEN_MS, "ms")
