"""Reloads of a model under load, during which no answer may fail, be cut or change."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import click
import msgspec

from control.records import catalog
from control.redis.clients import SyncRedis
from control.replicas import health
from ops.common.waiting import until
from ops.harness.client import Answer, Base, ask, chat
from ops.harness.farm import DEMO, demo_spec, private_farm, say
from ops.harness.program import Figure, Outcome, benchmark, run

KINDS = ("reload", "reload in place", "other settings")
"""In turn: one more replica meanwhile; none, so that requests wait; a change of the specification."""
KV_TOKENS = (6000, 7000)
"""The setting that changes."""
PROMPTS = tuple(f"Count from {first} to 100." for first in (1, 2, 3, 4))
LENGTH = 160
LIMIT_S = 300.0
TICK_S = 0.05


@dataclass(frozen=True)
class Change:
    """One reload: what ended while it was rolled out. `replaced` tells whether no process of before was left."""

    kind: str
    seconds: float
    answers: int
    failed: Counter[str]
    changed: int
    replaced: bool


class Clients:
    """Clients that ask one question after the other; every third without a stream."""

    def __init__(self, base: Base, expected: dict[str, str]) -> None:
        self._base = base
        self._expected = expected
        self._stopping = False
        self.answers = 0
        self.changed = 0
        self.failed: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        """Until stopped; what was asked by then is waited for."""
        await asyncio.gather(*(self._client(index) for index in range(count)))

    def stop(self) -> None:
        self._stopping = True

    async def _client(self, index: int) -> None:
        prompt = PROMPTS[index % len(PROMPTS)]
        while not self._stopping:
            self.note(
                prompt, await ask(self._base, chat(DEMO, prompt, LENGTH, stream=index % 3 != 2), user=f"user-{index}")
            )

    def note(self, prompt: str, answer: Answer) -> None:
        """Truncated is a failure too: `ask` counts the tokens."""
        self.answers += 1
        if answer.error is not None:
            self.failed[answer.error] += 1
        elif answer.text != self._expected[prompt]:
            self.changed += 1


@benchmark
def rolling(
    times: Annotated[int, "Number of reloads."] = 20,
    clients: int = 12,
    replicas: int = 1,
) -> Outcome:
    """Reload the model of a private farm (demo, two CPU ranks, float64) under load.

    Each answer is compared with that of the undisturbed run; exits 1 if one failed, was cut or differs.
    """
    spec = demo_spec(tp=2, dtype="float64", kv_tokens=KV_TOKENS[0])
    with private_farm(spec, replicas=(replicas,)) as farm:
        changes = asyncio.run(measure(farm.client, farm.base, times, clients))
    report(changes)
    figures = [
        Figure("answers that failed or were cut", sum(change.failed.total() for change in changes), 0),
        Figure("answers that differ", sum(change.changed for change in changes), 0),
        Figure("changes without an answer", sum(not change.answers for change in changes), 0),
        Figure("changes after which an old process was left", sum(not change.replaced for change in changes), 0),
    ]
    return Outcome(figures, {"changes": changes})


async def measure(client: SyncRedis, base: Base, times: int, count: int) -> list[Change]:
    """Reload `times` times while the clients ask; the last one has what ended after it too. Raises RequestFailed."""
    expected: dict[str, str] = {}
    for prompt in PROMPTS:
        expected[prompt] = (await ask(base, chat(DEMO, prompt, LENGTH), user="alone")).check().text
    clients = Clients(base, expected)
    asking = asyncio.create_task(clients.run(count))
    changes: list[Change] = []
    for index in range(times):
        before = (clients.answers, Counter(clients.failed), clients.changed)
        kind = KINDS[index % len(KINDS)]
        begun = time.monotonic()
        replaced = await asyncio.to_thread(roll, client, kind, index)
        seconds = time.monotonic() - begun
        if index == times - 1:
            clients.stop()
            await asking
        answers = clients.answers - before[0]
        failed = clients.failed - before[1]
        changed = clients.changed - before[2]
        changes.append(Change(kind, seconds, answers, failed, changed, replaced))
        say(f"{index + 1} of {times}, {kind}: {seconds:.1f} s, {answers} answers, {failed.total()} failed")
    return changes


def roll(client: SyncRedis, kind: str, index: int) -> bool:
    """Make the change and wait until it is rolled out; whether every process of before has been replaced."""
    old = leaders(client)
    spec = catalog.get_spec(client, DEMO)
    assert spec is not None
    if kind == "other settings":
        other = KV_TOKENS[spec.kv_tokens == KV_TOKENS[0]]
        catalog.put_spec(client, msgspec.structs.replace(spec, kv_tokens=other, surge=True))
    else:
        catalog.put_spec(client, msgspec.structs.replace(spec, surge=kind == "reload"), again=True)
    until(lambda: health.overview(client, DEMO).is_rolled_out, f"change {index + 1} is rolled out", LIMIT_S, TICK_S)
    return not old & leaders(client)


def leaders(client: SyncRedis) -> set[int]:
    """The leaders' process ids."""
    return {one.beats[0].pid for one in health.overview(client, DEMO).replicas if one.beats[0] is not None}


def report(changes: list[Change]) -> None:
    """One line for each kind, and why answers failed."""
    click.echo(f"{'change':<16}{'times':>7}{'median s':>10}{'worst s':>9}{'answers':>9}{'failed':>8}{'changed':>9}")
    for kind in KINDS:
        mine = [change for change in changes if change.kind == kind]
        if not mine:
            continue
        took = [change.seconds for change in mine]
        answers = sum(change.answers for change in mine)
        changed = sum(change.changed for change in mine)
        failed = sum(change.failed.total() for change in mine)
        click.echo(f"{kind:<16}{len(mine):>7}{median(took):>10.1f}{max(took):>9.1f}{answers:>9}{failed:>8}{changed:>9}")
    for reason, count in sum((change.failed for change in changes), Counter[str]()).items():
        click.echo(f"failed: {count} × {reason}")


if __name__ == "__main__":
    run(rolling)
