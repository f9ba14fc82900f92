"""Requests cancelled under load, and the time until each one's slot is free."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Annotated

import click

from control.keys import ModelKeys
from control.redis.clients import AsyncRedis
from control.redis.connection import connect_async
from ops.harness.client import CHAT, Base, Response, chat, now_ms, prompt, request
from ops.harness.farm import DEMO, demo_spec, private_farm
from ops.harness.program import Figure, benchmark, run, summarise

KEYS = ModelKeys(DEMO)
MAX_TOKENS = 400
LONGEST_S = 0.5
"""A stream is cancelled at a random moment within so long after its first text."""
ALLOWANCE_MS = 50.0
PATIENCE_S = 30.0
LOOK_S = 0.002
DISCONNECT = "client disconnects"
DELETE = "DELETE"


@dataclass
class Cancels:
    """Milliseconds from the client's act, and from the moment at which Redis was told, to the end in the leader's own
    emission: then the scheduler has dropped the request. `steps` are the gaps between a running request's tokens."""

    by_way: dict[str, list[float]] = field(default_factory=lambda: {DISCONNECT: [], DELETE: []})
    from_redis: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    late: int = 0
    """Requests that had ended before they could be cancelled."""


@benchmark
def cancel(
    times: Annotated[int, click.IntRange(2), "Cancels in all, half each way."] = 1000,
    streams: Annotated[int, "Streams at one time."] = 16,
) -> list[Figure]:
    """Cancel streams of a private farm (demo, one CPU rank) while others run and new ones begin.

    Half of the clients close their connection, half send DELETE /v1/requests/<rid>. The time counts from the client's
    own act, so HTTP is part of it. A slot is free once the leader has ended the request.
    """
    with private_farm(demo_spec()) as farm:
        cancels = asyncio.run(drive(farm.base, farm.redis_url, times, streams))
    click.echo(f"{'ms':<24}{'count':>8}{'p50':>10}{'p99':>10}{'max':>10}")
    for name, values in {"step": cancels.steps, "told to free": cancels.from_redis, **cancels.by_way}.items():
        one = summarise(values)
        click.echo(f"{name:<24}{one.count:>8}{one.p50:>10.1f}{one.p99:>10.1f}{one.max:>10.1f}")
    click.echo(f"{cancels.late} had ended before")
    limit = summarise(cancels.steps).p99 + ALLOWANCE_MS
    figures = [Figure("cancels", sum(map(len, cancels.by_way.values())), times, at_least=True)]
    for way, values in cancels.by_way.items():
        figures.append(Figure(f"{way}: p99 to the free slot", summarise(values).p99, limit, "ms"))
    return figures


async def drive(base: Base, redis_url: str, times: int, streams: int) -> Cancels:
    """Keep `streams` on their way until so many were cancelled each way."""
    client = connect_async(redis_url)
    cancels = Cancels()
    chance = random.Random(1)
    quota = (times + 1) // 2
    turns = iter(range(100 * times))

    async def one_client() -> None:
        while way := next((way for way, done in cancels.by_way.items() if len(done) < quota), None):
            turn = next(turns)
            way = DISCONNECT if turn % 2 and len(cancels.by_way[DISCONNECT]) < quota else way
            await cancel_one(base, client, turn, way, chance.uniform(0, LONGEST_S), cancels)

    observer = asyncio.create_task(observe_steps(base, client, cancels.steps))
    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(streams):
                tasks.create_task(one_client())
    finally:
        observer.cancel()
        await client.aclose()
    return cancels


async def cancel_one(base: Base, client: AsyncRedis, turn: int, way: str, after: float, cancels: Cancels) -> None:
    """Start a stream, wait for its first text and `after` seconds, cancel it, and wait until it has ended."""
    async with stream(base, turn) as response:
        rid = response.headers["x-request-id"]
        await first_text(response)
        await asyncio.sleep(after)
        acted = now_ms()
        if way == DELETE:
            async with request(base, "DELETE", f"/v1/requests/{rid}", headers=bearer(turn)) as deleted:
                await deleted.read()
    state, t_cancel, t_last = await ended(client, rid)
    if state != "cancelled" or not t_cancel:
        cancels.late += 1
        return
    cancels.by_way[way].append(t_last - acted)
    cancels.from_redis.append(t_last - t_cancel)


async def ended(client: AsyncRedis, rid: str) -> tuple[str, float, float]:
    """State, t_cancel and t_last of a request, once it has ended. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            state, t_cancel, t_last = await client.hmget(KEYS.request(rid), ["state", "t_cancel", "t_last"])
            if state not in ("queued", "running"):
                return str(state), float(t_cancel or 0), float(t_last or 0)
            await asyncio.sleep(0.02)


async def observe_steps(base: Base, client: AsyncRedis, gaps: list[float]) -> None:
    """Until cancelled: the time between the tokens of a request that is left alone, which is the time of a step."""
    turn = 10**6
    while True:
        turn += 1
        async with stream(base, turn) as response:
            log = KEYS.log(response.headers["x-request-id"])
            tokens = 0
            at = now_ms()
            while tokens < MAX_TOKENS:
                length = await client.xlen(log)
                now = now_ms()
                if length > tokens:
                    gaps.extend([(now - at) / (length - tokens)] * (length - tokens) if tokens else [])
                    tokens = length
                    at = now
                await asyncio.sleep(LOOK_S)


def stream(base: Base, turn: int) -> AbstractAsyncContextManager[Response]:
    """A chat stream that ends by its length alone."""
    return request(base, "POST", CHAT, body=chat(DEMO, prompt(turn, 48), MAX_TOKENS), headers=bearer(turn))


def bearer(turn: int) -> dict[str, str]:
    return {"authorization": f"Bearer user-{turn % 5}"}


async def first_text(response: Response) -> None:
    """Read until some text has come. Raises EOFError where the stream ends without."""
    async for _, data, _ in response.events():
        if data != b"[DONE]" and any(choice["delta"].get("content") for choice in json.loads(data).get("choices", [])):
            return
    raise EOFError("the stream ended without any text")


if __name__ == "__main__":
    run(cancel)
