"""The load scenarios, by name. Every request is greedy; users and models take turns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True)
class Scenario:
    """`replicas` has one number per model; `prompt_bytes` is the length of each prompt's text."""

    name: str
    replicas: tuple[int, ...]
    users: int
    requests: int
    concurrency: int
    max_tokens: int
    stream: bool = True
    prompt_bytes: int = 48

    @property
    def models(self) -> int:
        return len(self.replicas)

    def turn(self, index: int) -> tuple[int, int]:
        """Indices of the user and the model of request `index`. A user meets every model."""
        # Where the two turns fall into step, the models' turn is shifted by one each time round.
        return index % self.users, (index + index // math.lcm(self.users, self.models)) % self.models


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("1-streaming", (1,), users=1, requests=30, concurrency=5, max_tokens=64),
        Scenario("1-non-streaming", (1,), users=1, requests=20, concurrency=5, max_tokens=64, stream=False),
        Scenario("multi-model", (4, 3), users=5, requests=50, concurrency=10, max_tokens=64),
        Scenario("high-concurrency", (3,), users=10, requests=60, concurrency=20, max_tokens=32),
        Scenario("queue-saturation", (1,), users=10, requests=40, concurrency=15, max_tokens=32),
        Scenario("20-users", (3,), users=20, requests=60, concurrency=10, max_tokens=32),
        Scenario("scaling-1", (1,), users=5, requests=30, concurrency=10, max_tokens=32),
        Scenario("scaling-3", (3,), users=5, requests=30, concurrency=10, max_tokens=32),
        Scenario("scaling-5", (5,), users=5, requests=30, concurrency=10, max_tokens=32),
        Scenario("heavy", (3,), users=20, requests=100, concurrency=100, max_tokens=32, prompt_bytes=10_240),
    )
}


def chosen(names: tuple[str, ...]) -> list[Scenario]:
    """The scenarios named, in that order; all of them for none. Raises UsageError for an unknown name."""
    for name in names:
        if name not in SCENARIOS:
            raise click.UsageError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names] or list(SCENARIOS.values())
