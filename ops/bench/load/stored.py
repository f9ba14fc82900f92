"""Chat completions with `store` at a steady rate: nothing is lost, and the API goes on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import click

from control.keys import ResponseKeys
from control.records.responses import KEYLESS
from control.redis.clients import SyncRedis
from ops.bench.load.overload import arrivals
from ops.harness.client import CHAT, Base, ask, chat, prompt, request
from ops.harness.farm import DEMO, NOBODY_REFUSED, demo_spec, private_farm
from ops.harness.program import Figure, benchmark, run, summarise

TOKENS = 8
PROMPT_BYTES = 320
PING_S = 0.02
LAG = 1.5
"""p99 of the answers to pings beside the load, as a multiple of that beside the same load without `store`: a loop that
is blocked answers none."""
GROWTH_MIB = 32.0
"""Growth of Redis' memory from the moment at which the quota is full: ended requests are kept for two minutes."""


@dataclass
class Seen:
    """The load, as its clients saw it."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    """The text of each stored answer by its id, in the order of their ends."""
    failed: list[str] = field(default_factory=list[str])
    pings: list[float] = field(default_factory=list[float])
    """Milliseconds."""
    memory: list[int] = field(default_factory=list[int])
    """Redis' bytes each second, from the moment at which the quota is full."""


@benchmark
def stored(
    rate: Annotated[float, "Chats a second."] = 30.0,
    seconds: Annotated[float, "Duration of the load."] = 60.0,
    number: Annotated[int, "Option of the API: --response-number."] = 500,
) -> list[Figure]:
    """Send chats with `store` to a private farm (demo, one CPU rank), every other one as a stream, and read them again.

    Exit status 1 where one of the newest --number is lost or differs, or a figure is missed.
    """
    with private_farm(demo_spec(), "--response-number", str(number), *NOBODY_REFUSED) as farm:
        client = farm.client
        base = farm.base
        plain = asyncio.run(_load(base, client, rate, seconds, number, store=False))
        seen = asyncio.run(_load(base, client, rate, seconds, number, store=True))
        lost = asyncio.run(_lost(base, seen, number))
        records = sum(1 for _ in client.scan_iter(ResponseKeys(KEYLESS).record("*"), count=1000))
    for error in seen.failed[:3]:
        click.echo(f"failed: {error}")
    before = summarise(plain.pings)
    pings = summarise(seen.pings)
    click.echo(f"{len(plain.texts)} chats not stored; pings p50 {before.p50:.1f} ms, max {before.max:.0f} ms")
    click.echo(
        f"{len(seen.texts)} chats stored, {records} records left; pings p50 {pings.p50:.1f} ms, max {pings.max:.0f} ms"
    )
    return figures(seen, pings.p99 / before.p99, lost, records, rate * seconds, number)


def figures(seen: Seen, lag: float, lost: int, records: int, offered: float, number: int) -> list[Figure]:
    """The figures with limits."""
    grown = (max(seen.memory) - seen.memory[0]) / 2**20 if seen.memory else float("inf")
    return [
        Figure("chats answered", len(seen.texts), 0.8 * offered, at_least=True),
        Figure("chats that failed", len(seen.failed), 0),
        Figure("stored chats that are lost or differ", lost, 0),
        Figure("records in Redis", records, number),
        Figure("growth of Redis behind the quota", grown, GROWTH_MIB, "MiB"),
        Figure("p99 of pings, beside that without store", lag, LAG),
    ]


async def _load(base: Base, client: SyncRedis, rate: float, seconds: float, number: int, *, store: bool) -> Seen:
    seen = Seen()
    beside = [asyncio.create_task(work) for work in (_ping(base, seen), _watch(client, seen, number))]
    async with asyncio.TaskGroup() as tasks:
        async for index in arrivals(rate, seconds):
            tasks.create_task(_chat(base, index, seen, store))
    for task in beside:
        task.cancel()
    return seen


async def _ping(base: Base, seen: Seen) -> None:
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        async with request(base, "GET", "/health") as response:
            await response.read()
        seen.pings.append(1000 * (loop.time() - began))
        await asyncio.sleep(PING_S)


async def _watch(client: SyncRedis, seen: Seen, number: int) -> None:
    while True:
        if len(seen.texts) >= number:
            memory: Any = await asyncio.to_thread(client.info, "memory")
            seen.memory.append(int(memory["used_memory"]))
        await asyncio.sleep(1.0)


async def _chat(base: Base, index: int, seen: Seen, store: bool) -> None:
    text = prompt(index, PROMPT_BYTES)
    answer = await ask(base, chat(DEMO, text, TOKENS, stream=index % 2 == 0, store=store, ignore_eos=False))
    if answer.error is None:
        seen.texts[answer.identity] = answer.text
    else:
        seen.failed.append(answer.error)


async def _lost(base: Base, seen: Seen, number: int) -> int:
    """The number of the newest chats that are missing or differ from their answers. Only half are looked at, because
    chats end in another order than they were sent, and the oldest are removed."""
    lost = 0
    for identity in list(seen.texts)[-number // 2 :]:
        async with request(base, "GET", f"{CHAT}/{identity}") as response:
            text = await response.read()
            text_again = response.status == 200 and json.loads(text)["choices"][0]["message"]["content"]
            lost += text_again != seen.texts[identity]
    return lost


if __name__ == "__main__":
    run(stored)
