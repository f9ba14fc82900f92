"""Ten times the load that a farm can carry: memory, waiting times and refusals."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Annotated

import click

from ops.harness.client import Answer, Base, ask, chat, now_ms, prompt
from ops.harness.farm import DEMO, demo_spec, private_farm, say
from ops.harness.processes import MemoryByPart, growth, looking
from ops.harness.program import Figure, Summary, benchmark, run, summarise

USERS = 5
MAX_TOKENS = 48
PROMPT_BYTES = 320
CLIENTS = 8
"""Their rate, with one request at a time each, is the first guess at the capacity; twice that saturates the farm."""
GUESS_S = 5.0
SETTLE = 1 / 3
"""Of the time in which the capacity is measured: the queue fills meanwhile, and nothing counts."""
TTFT_FACTOR = 1.5
GROWTH_MIB = 32.0
"""Growth of a part's peak in the second half of the overload: ended requests are kept for two minutes."""
REFUSED = "429 rate_limit_exceeded"


@dataclass
class Phase:
    """The answers to an offered load of `rate` requests a second."""

    rate: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def admitted(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error is None]

    @property
    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error == REFUSED]

    @property
    def ttft(self) -> Summary:
        """Of the admitted, ms at the client. Raises ValueError where none was admitted."""
        return summarise([answer.first_ms - answer.sent_ms for answer in self.admitted if answer.first_ms is not None])


@benchmark
def overload(
    seconds: Annotated[float, "Duration of the nominal load and of the overload."] = 60.0,
    calibrate: Annotated[float, "Seconds in which the capacity is measured."] = 15.0,
    times: Annotated[float, "Overload, as a multiple of the capacity."] = 10.0,
    kv_tokens: Annotated[int, "Tokens of KV memory, which limits the running requests."] = 400,
    max_queue_wait: Annotated[float, "Option of the API: longest expected wait of a request, in seconds."] = 0.7,
) -> list[Figure]:
    """Measure a private farm (demo, one CPU rank) at its capacity and far beyond.

    The capacity is the completed rate while more is offered. The nominal load has this rate and arrives at random
    (Poisson); the overload has --times this rate. A refused request is not sent again.
    """
    with private_farm(demo_spec(kv_tokens=kv_tokens), "--max-queue-wait", str(max_queue_wait)) as farm:
        base = farm.base
        memory = MemoryByPart()
        capacity = asyncio.run(measure_capacity(base, calibrate))
        say(f"capacity {capacity:.1f} req/s")
        nominal = asyncio.run(offer(base, Phase(capacity), seconds))
        say(f"nominal load: {len(nominal.refused)} of {len(nominal.answers)} refused")
        with looking(memory.look, memory.EVERY_S):
            beyond = asyncio.run(offer(base, Phase(times * capacity), seconds))
    for title, phase in (("nominal", nominal), ("overload", beyond)):
        ttft = phase.ttft
        click.echo(
            f"{title:<9} {phase.rate:6.1f} req/s offered, {len(phase.admitted)} of {len(phase.answers)} admitted, "
            f"TTFT p50 {ttft.p50:.0f} ms, p99 {ttft.p99:.0f} ms, max {ttft.max:.0f} ms"
        )
    for part, values in memory.samples.items():
        click.echo(f"memory    {part}: {values[0]:.0f} MiB at the start, peak {max(values):.0f} MiB")
    return figures(nominal, beyond, growth(memory.samples))


def figures(nominal: Phase, beyond: Phase, grown: dict[str, float]) -> list[Figure]:
    """The figures with limits."""
    failures = Counter(a.error for a in nominal.answers + beyond.answers if a.error not in (None, REFUSED))
    if failures:
        click.echo(f"failures: {dict(failures)}")
    mute = sum(answer.retry_after_s is None for answer in beyond.refused)
    return [
        Figure("p99 TTFT of the admitted under overload", beyond.ttft.p99, TTFT_FACTOR * nominal.ttft.p99, "ms"),
        Figure("requests refused under overload", len(beyond.refused), 1, at_least=True),
        Figure("refusals without Retry-After", mute, 0),
        Figure("requests that failed otherwise", failures.total(), 0),
        Figure("parts whose memory was seen", len(grown), 3, at_least=True),
        *(Figure(f"{part}: growth of the peak", mib, GROWTH_MIB, "MiB") for part, mib in grown.items()),
    ]


async def measure_capacity(base: Base, seconds: float) -> float:
    """Requests per second that end while twice as many arrive as one client after another could ask."""
    saturated = await offer(base, Phase(2 * await _guess(base, GUESS_S)), seconds)
    first = min(answer.sent_ms for answer in saturated.answers)
    from_ms = first + 1000 * SETTLE * seconds
    until_ms = first + 1000 * seconds
    counted = sum(from_ms <= answer.end_ms <= until_ms for answer in saturated.admitted)
    return max(1, counted) / ((1 - SETTLE) * seconds)


async def _guess(base: Base, seconds: float) -> float:
    """Requests per second of CLIENTS that ask again and again."""
    until = now_ms() + 1000 * seconds
    ended = 0

    async def client(index: int) -> None:
        nonlocal ended
        turn = 0
        while now_ms() < until:
            turn += 1
            await _ask(base, 100_000 + 1000 * index + turn)
            ended += 1

    await asyncio.gather(*(client(index) for index in range(CLIENTS)))
    return ended / seconds


async def arrivals(rate: float, seconds: float) -> AsyncIterator[int]:
    """Numbers at random moments (Poisson), so many a second."""
    chance = random.Random(1)
    loop = asyncio.get_running_loop()
    at = loop.time()
    end = loop.time() + seconds
    index = 0
    while at < end:
        await asyncio.sleep(at - loop.time())
        yield index
        index += 1
        at += chance.expovariate(rate)


async def offer(base: Base, phase: Phase, seconds: float) -> Phase:
    """Send requests at the phase's rate, and wait for every answer."""

    async def send(index: int) -> None:
        phase.answers.append(await _ask(base, index))

    async with asyncio.TaskGroup() as tasks:
        async for index in arrivals(phase.rate, seconds):
            tasks.create_task(send(index))
    return phase


async def _ask(base: Base, index: int) -> Answer:
    return await ask(base, chat(DEMO, prompt(index, PROMPT_BYTES), MAX_TOKENS), user=f"user-{index % USERS}")


if __name__ == "__main__":
    run(overload)
