"""Runs one scenario: as many clients as its concurrency, each asking again as soon as it has its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from control.redis.clients import AsyncRedis
from ops.bench.common.ask import Answer, ask, now_ms
from ops.bench.common.client import Base
from ops.bench.common.prompts import prompt
from ops.bench.load.scenarios import Scenario
from ops.bench.load.stamps import StampCollector


@dataclass(frozen=True, slots=True)
class Measured:
    """The answers of a scenario. `stamps` is by rid; `seconds` is from the first request to the last answer."""

    scenario: Scenario
    answers: list[Answer]
    stamps: dict[str, dict[str, float]]
    seconds: float


async def run(scenario: Scenario, base: Base, models: list[str], client: AsyncRedis) -> Measured:
    """Put the scenario's load on the API at `base`; `models` has as many names as the scenario asks for."""
    collector = StampCollector(client)
    turns = iter(range(scenario.requests))
    answers: list[Answer] = []

    async def one_client() -> None:
        for index in turns:
            user, model = scenario.turn(index)
            text = prompt(index, scenario.prompt_bytes)
            answer = await ask(base, f"user-{user}", models[model], text, scenario.max_tokens, scenario.stream)
            answers.append(answer)
            if answer.error is None and answer.rid:
                collector.add(answer)

    all_asked = asyncio.Event()
    began = now_ms()
    async with asyncio.TaskGroup() as tasks:
        collecting = tasks.create_task(collector.run(all_asked))
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(scenario.concurrency):
                    clients.create_task(one_client())
        finally:
            all_asked.set()
        seconds = (max(answer.end_ms for answer in answers) - began) / 1000
        await collecting
    return Measured(scenario, answers, collector.found, seconds)
