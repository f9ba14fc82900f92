"""Models that take turns in the memory of one host, which has room for one of them: waits and switches, beside the
fewest switches that a schedule which knows the future needs."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import click

from control.listening import free_port
from control.placement.demand import STAY_MS
from ops.common.waiting import until
from ops.demo import MODEL_DIR
from ops.harness.client import Base, RequestFailed, ask, completion
from ops.harness.farm import HOST, say, serve
from ops.harness.program import PATH, Figure, benchmark, run

MOST_WAIT_S = 120.0
MORE_SWITCHES = 1.1
"""Than the fewest."""
FIRST_S = 2.5
"""Limit of the first answer of a model that sleeps, where there is room."""
START_S = 120.0
WOKEN = re.compile(r'"action": "model_wake"')
LOADED = re.compile(r'"load_s": ([0-9.]+), "action": "model_load"')


@benchmark
def turns(
    models: Annotated[int, click.IntRange(2, 4), "Models."] = 3,
    requests: int = 300,
    minutes: Annotated[float, click.FloatRange(0, min_open=True)] = 10.0,
    memory: Annotated[str, "Of the host: room for one model."] = "420MiB",
    source: Annotated[Path, PATH, "The model's files."] = MODEL_DIR,
    seed: Annotated[int, int] = 1,
) -> list[Figure]:
    """Send requests to models in random turns; exit status 1 over a limit."""
    click.echo(f"{models} models, {requests} requests in {minutes:g} minutes, {memory}")
    draw = random.Random(seed)
    names = [f"model-{index}" for index in range(models)]
    arrivals = sorted((draw.uniform(0, minutes * 60), draw.randrange(models)) for _ in range(requests))
    with TemporaryDirectory(prefix="furrow-turns-") as folder:
        offered = Path(folder) / "models"
        for name in names:
            copy(source, offered, name)
        port = free_port(HOST, 0)
        options = ["--models", str(offered), "--memory", memory, "--port", str(port), "--data", f"{folder}/data"]
        with serve(*options) as process:
            log = Log(process)
            until(lambda: "are served at " in log.text, "the models are offered", START_S)
            base = Base(HOST, port)
            first_s = asyncio.run(answer_s(base, names[0]))
            waits = asyncio.run(send(base, names, arrivals))
            process.terminate()
            log.join(START_S)  # reads its output to the end
    switches = len(WOKEN.findall(log.text))
    load_s = median(map(float, LOADED.findall(log.text)))
    times = [wait for wait in waits if wait is not None]
    by_model = [[at for at, model in arrivals if model == index] for index in range(models)]
    fewest = fewest_switches(by_model, load_s, STAY_MS / 1000, MOST_WAIT_S)
    click.echo(f"  {switches} switches, the fewest are {fewest}; a switch takes {load_s:.2f} s")
    click.echo(f"  waits: median {median(times):.1f} s, longest {max(times):.1f} s")
    return [
        Figure("failed requests", len(waits) - len(times), 0),
        Figure("longest wait", max(times), MOST_WAIT_S, "s"),
        Figure("switches by the fewest", switches / fewest, MORE_SWITCHES),
        Figure("first answer of a model that sleeps", first_s, FIRST_S, "s"),
    ]


def copy(source: Path, offered: Path, name: str) -> None:
    """The same model once more, as links."""
    if source.is_file():
        offered.mkdir(exist_ok=True)
        (offered / f"{name}{source.suffix}").symlink_to(source.resolve())
        return
    (offered / name).mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copy(file, offered / name / file.name)


class Log(threading.Thread):
    """The output of the farm."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        assert process.stdout is not None
        self._output = process.stdout
        self.text = ""
        self.start()

    def run(self) -> None:
        for line in self._output:
            self.text += line


async def answer_s(base: Base, model: str) -> float:
    """Seconds until the whole answer of a few tokens. Raises RequestFailed."""
    began = time.monotonic()
    (await ask(base, completion(model, "abc", 4, stream=False, ignore_eos=False))).check()
    return time.monotonic() - began


async def send(base: Base, names: Sequence[str], arrivals: Sequence[tuple[float, int]]) -> list[float | None]:
    """The seconds of each request; None for one that failed."""
    began = time.monotonic()

    async def send_at(at: float, model: int) -> float | None:
        await asyncio.sleep(began + at - time.monotonic())
        try:
            return await answer_s(base, names[model])
        except RequestFailed as error:
            say(f"failed after {at:.1f} s: {error}")
            return None

    return await asyncio.gather(*(send_at(at, model) for at, model in arrivals))


def fewest_switches(
    arrivals: Sequence[Sequence[float]], load_s: float, stay_s: float, wait_s: float, grid_s: float = 5.0
) -> int:
    """The fewest loads of a schedule that knows all arrivals: one model has the room, stays for `stay_s` at least once
    it is loaded, and no request waits longer than `wait_s`. Times are on a grid, and loads that it rounds take less."""
    longest = int((max(at for own in arrivals for at in own) + wait_s) // grid_s) + 1
    stays = range(max(1, int(stay_s // grid_s)), longest)
    load = int(load_s // grid_s)
    everyone = range(len(arrivals))
    steps = [[at / grid_s for at in own] for own in arrivals]
    patience = wait_s / grid_s
    # A state: the time, and for each model how many of its requests were served. The model that leaves is the last one.
    states = {(0, -1, tuple(0 for _ in everyone))}
    for switches in itertools.count():
        following: set[tuple[int, int, tuple[int, ...]]] = set()
        for now, last, served in states:
            if all(count == len(own) for count, own in zip(served, steps, strict=True)):
                return switches
            for model in everyone:
                if model == last or served[model] == len(steps[model]):
                    continue
                loaded = max(now, int(steps[model][served[model]]) if last < 0 else now) + load
                if loaded - steps[model][served[model]] > patience:
                    continue
                for stay in stays:
                    until_step = loaded + stay
                    count = sum(at <= until_step for at in steps[model])
                    after = tuple(
                        max(count, answered) if index == model else answered for index, answered in enumerate(served)
                    )
                    waiting = [
                        steps[number][after[number]] for number in everyone if after[number] < len(steps[number])
                    ]
                    if all(until_step - at <= patience for at in waiting):
                        following.add((until_step, model, after))
                    elif waiting and min(waiting) + patience < until_step:
                        break
        states = _best(following)
        if not states:
            raise ValueError("no schedule keeps all waits below the limit")
    raise AssertionError


def _best(states: set[tuple[int, int, tuple[int, ...]]]) -> set[tuple[int, int, tuple[int, ...]]]:
    """Without each state to which another one of the same time and model is equal or better: it has served at least as
    many requests of every model."""
    best: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for now, model, served in states:
        others = best.setdefault((now, model), [])
        if any(all(mine <= theirs for mine, theirs in zip(served, counts, strict=True)) for counts in others):
            continue
        best[now, model] = [
            counts for counts in others if not all(mine <= theirs for mine, theirs in zip(counts, served, strict=True))
        ] + [served]
    return {(now, model, served) for (now, model), states_of in best.items() for served in states_of}


if __name__ == "__main__":
    run(turns)
