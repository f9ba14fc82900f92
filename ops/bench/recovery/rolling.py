"""Reloads of a model under load, during which no answer may fail, be cut or change."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from dataclasses import dataclass

import click
import msgspec

from control.messages import ModelSpec
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from control.replicas import health
from ops.bench import program
from ops.bench.common.ask import Answer, ask
from ops.bench.common.client import Base
from ops.bench.common.farm import private_farm, say
from ops.bench.common.machine import describe
from ops.common.waiting import until
from ops.demo import MODEL_DIR

MODEL = "demo"
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
        self._base, self._expected = base, expected
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
            self.note(prompt, await ask(self._base, f"user-{index}", MODEL, prompt, LENGTH, stream=index % 3 != 2))

    def note(self, prompt: str, answer: Answer) -> None:
        """Truncated is a failure too: `ask` counts the tokens."""
        self.answers += 1
        if answer.error is not None:
            self.failed[answer.error] += 1
        elif answer.text != self._expected[prompt]:
            self.changed += 1


@click.command()
@click.option("--times", type=click.IntRange(1), default=20, show_default=True, help="Number of reloads.")
@click.option("--clients", type=click.IntRange(1), default=12, show_default=True)
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True)
def rolling(times: int, clients: int, replicas: int) -> None:
    """Reload the model of a private farm (demo, two CPU ranks, float64) under load.

    Each answer is compared with that of the undisturbed run; exits 1 if one failed, was cut or differs.
    """
    spec = ModelSpec(name=MODEL, source=str(MODEL_DIR), tp=2, devices=["cpu", "cpu"], dtype="float64")
    click.echo(describe())
    with private_farm(msgspec.structs.replace(spec, kv_tokens=KV_TOKENS[0]), (replicas,)) as (url, redis_url, _):
        client = connect(redis_url)
        changes = asyncio.run(measure(client, Base.of(url), times, clients))
        client.close()
    report(changes)
    if any(change.failed or change.changed or not change.answers or not change.replaced for change in changes):
        raise SystemExit(1)


async def measure(client: SyncRedis, base: Base, times: int, count: int) -> list[Change]:
    """Reload `times` times while the clients ask; the first entry of the last one holds what ended after it."""
    expected: dict[str, str] = {}
    for prompt in PROMPTS:
        answer = await ask(base, "alone", MODEL, prompt, LENGTH, stream=True)
        if answer.error is not None:
            raise SystemExit(f"rolling: the undisturbed run failed: {answer.error}")
        expected[prompt] = answer.text
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
        answers, failed, changed = clients.answers - before[0], clients.failed - before[1], clients.changed - before[2]
        changes.append(Change(kind, seconds, answers, failed, changed, replaced))
        say(f"{index + 1} of {times}, {kind}: {seconds:.1f} s, {answers} answers, {failed.total()} failed")
    return changes


def roll(client: SyncRedis, kind: str, index: int) -> bool:
    """Make the change and wait until it is rolled out; whether every process of before has been replaced."""
    old = leaders(client)
    spec = catalog.get_spec(client, MODEL)
    assert spec is not None
    if kind == "other settings":
        other = KV_TOKENS[spec.kv_tokens == KV_TOKENS[0]]
        catalog.put_spec(client, msgspec.structs.replace(spec, kv_tokens=other, surge=True))
    else:
        catalog.put_spec(client, msgspec.structs.replace(spec, surge=kind == "reload"), again=True)
    until(lambda: health.overview(client, MODEL).is_rolled_out, f"change {index + 1} is rolled out", LIMIT_S, TICK_S)
    return not old & leaders(client)


def leaders(client: SyncRedis) -> set[int]:
    """The leaders' process ids."""
    return {one.beats[0].pid for one in health.overview(client, MODEL).replicas if one.beats[0] is not None}


def report(changes: list[Change]) -> None:
    """One line for each kind, and why answers failed."""
    click.echo(f"{'change':<16}{'times':>7}{'median s':>10}{'worst s':>9}{'answers':>9}{'failed':>8}{'changed':>9}")
    for kind in KINDS:
        mine = [change for change in changes if change.kind == kind]
        if not mine:
            continue
        took = [change.seconds for change in mine]
        answers, changed = sum(change.answers for change in mine), sum(change.changed for change in mine)
        failed = sum(change.failed.total() for change in mine)
        click.echo(
            f"{kind:<16}{len(mine):>7}{statistics.median(took):>10.1f}{max(took):>9.1f}{answers:>9}{failed:>8}{changed:>9}"
        )
    for reason, count in sum((change.failed for change in changes), Counter[str]()).items():
        click.echo(f"failed: {count} × {reason}")
    if not all(change.replaced for change in changes):
        click.echo("a process of before was still there: the change had no effect")


if __name__ == "__main__":
    program.run(rolling)
