"""Faults of whole replicas: a request that crashes the groups of two, and replicas that are given up."""

from __future__ import annotations

import asyncio
import json
import math
import random
import signal
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from control.keys import ModelKeys
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.operations import desired
from control.operations.spec import Scale
from control.records import catalog
from control.redis.connection import read, run
from control.replicas import health, model_overviews
from control.requests import Enqueue, dead_letters, drop_letter, enqueue
from ops.chaos.errors import Harm, NoEffect
from ops.chaos.faults.fault import Fault
from ops.chaos.system.target import Target
from ops.harness.client import Base, request

# A prompt of this one token crashes the leader that feeds it, by sabotage.FRAIL.
CRASHING_TOKEN = 11
CRASHING_TOKENS = 512
CAUSE_WITHIN_S = 5.0
"""Limit until clients get the cause after the only replica of a model was given up."""
START_WITHIN_S = 480.0
REFUSALS = 5
"""New requests of which the last must be a 503; earlier ones may be admitted and end with the cause."""
SOLE = "sole"
ANSWER_WITHIN_S = 240.0
LONG = 8000
"""Tokens of an answer that must still run when its replica ends."""


# --- two replicas -----------------------------------------------------------------------------------------------------


@contextmanager
def two_replicas(target: Target) -> Generator[list[str]]:
    """Yield the names of two replicas that run streams; one of them ends afterwards."""
    model = target.spec.name
    desired.scale(target.client, model, Scale(2, 2))
    try:
        rolled_out(target, "two replicas serve")
        names = [replica.replica for replica in target.overview().replicas]
        target.proved(lambda: all(running(target, model, name) for name in names), "both replicas have requests")
        yield names
    finally:
        desired.scale(target.client, model, Scale(1, 1))
        rolled_out(target, "one replica is left")
        target.replica = target.overview().replicas[0].replica


def rolled_out(target: Target, event: str) -> None:
    """Wait until the desired replicas serve: on a busy machine their start takes minutes."""
    target.until(lambda: target.overview().is_rolled_out, event, START_WITHIN_S)


def running(target: Target, model: str, replica: str) -> int:
    """The number of requests that the replica runs."""
    return run(target.client, read("ZCARD", f"{ModelKeys(model).replica(replica).base}running", parse=int))


def crashes(target: Target, names: list[str]) -> set[tuple[str, int]]:
    """(replica, epoch) of all epochs that were poisoned."""
    model = target.spec.name
    return {(name, poison.epoch) for name in names for poison in run(target.client, health.poison_history(model, name))}


def crash_two_replicas(target: Target, random: random.Random) -> str:
    """Send a request that crashes its leader; both replicas together must find it within log2(n) + 2 crashes."""
    model = target.spec.name
    with two_replicas(target) as names:
        before = crashes(target, names)
        rows = 1 + sum(running(target, model, name) for name in names)
        params = GenerationRequest(prompt=[CRASHING_TOKEN] * CRASHING_TOKENS, sampling=Sampling(max_tokens=4))
        crasher = Enqueue(rid=f"{random.getrandbits(128):032x}", model=model, params=params, tenant="chaos")
        run(target.client, enqueue(crasher))
        letters = target.proved(lambda: run(target.client, dead_letters(model)), "the crasher is a dead letter")
        rolled_out(target, "both replicas serve again")
        poisoned = crashes(target, names) - before
    most = math.ceil(math.log2(rows)) + 2
    proof = (
        f"{len(poisoned)} crashes of {len({name for name, _ in poisoned})} replicas, at most {most} for {rows} requests"
    )
    buried = [letter.rid for letter in run(target.client, dead_letters(model))]
    for letter in letters:
        run(target.client, drop_letter(model, letter))
    if not poisoned:
        raise NoEffect(f"the request {crasher.rid} crashed nothing")
    if buried != [crasher.rid] or len(poisoned) > most:
        raise Harm(f"{proof}; dead letters: {buried}, the crasher was {crasher.rid}")
    return proof


# --- given up ---------------------------------------------------------------------------------------------------------


@contextmanager
def damaged(folder: Path) -> Generator[None]:
    """Truncate the model's configuration: such a file is refused at once, while a missing one is retried."""
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text[:1])
    try:
        yield
    finally:
        config.write_text(text)


def lose(target: Target, model: str, replica: str, folder: Path) -> str:
    """Kill the replica's leader while its files are damaged, until the replica is given up; returns the cause."""
    beat = health.heartbeats(target.client, model, replica, 1)[0]
    if beat is None:
        raise NoEffect(f"the leader of {model} {replica} does not beat")
    with damaged(folder):
        target.send(beat.pid, signal.SIGKILL)
        event = f"{model} {replica} is given up"
        detail = target.until(lambda: given_up(target, model, replica), event, START_WITHIN_S)
    if str(folder) not in detail:
        raise Harm(f"{model} {replica} was given up because of its files in {folder}, and the reason is: {detail}")
    return detail


def given_up(target: Target, model: str, replica: str) -> str | None:
    status = run(target.client, health.status_of(model, replica))
    return status.detail if status is not None and status.state == "failed" else None


def answer(url: str, path: str, body: dict[str, Any]) -> tuple[str, float]:
    """The text of a request to the sole replica, read to its end, or of its error; and when it had ended."""
    until = time.monotonic() + ANSWER_WITHIN_S
    try:
        text = ask(url, path, body)[1]
        if body.get("background"):
            stored = f"{path}/{json.loads(text)['id']}"
            while json.loads(text).get("status") in ("queued", "in_progress") and time.monotonic() < until:
                time.sleep(0.1)
                text = ask(url, stored)[1]
    except (OSError, ValueError, KeyError) as error:  # TimeoutError is an OSError
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic()


def ask(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of a whole answer or error."""

    async def whole() -> tuple[int, str]:
        async with (
            asyncio.timeout(ANSWER_WITHIN_S),
            request(Base.of(url), "GET" if body is None else "POST", path, body=body or b"") as response,
        ):
            return response.status, (await response.read()).decode()

    return asyncio.run(whole())


def bodies() -> list[tuple[str, dict[str, Any]]]:
    """A stream, a whole answer and a stored one, all longer than the replica lives."""
    chat = {"model": SOLE, "messages": [{"role": "user", "content": "Count."}], "max_tokens": LONG, "ignore_eos": True}
    stored = {"model": SOLE, "input": "Count.", "max_output_tokens": LONG, "ignore_eos": True, "background": True}
    return [
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", stored),
    ]


def give_up_the_sole_one(target: Target, folder: Path) -> str:
    """Give up the only replica of a model: each client must get the cause soon, and new requests a 503."""
    spec = msgspec.structs.replace(
        target.spec, name=SOLE, source=str(folder), tp=1, devices=["cpu"], kv_tokens=4 * LONG, replicas=1, revision=0
    )
    catalog.put_spec(target.client, spec)
    clients = ThreadPoolExecutor()
    try:
        target.until(
            lambda: model_overviews.overview(target.client, SOLE).state == "loaded", f"{SOLE} serves", START_WITHIN_S
        )
        answers = [clients.submit(answer, target.urls[0], path, body) for path, body in bodies()]
        target.proved(lambda: running(target, SOLE, "r0") == len(answers), f"{SOLE} runs {len(answers)} requests")
        cause = lose(target, SOLE, "r0", folder)
        given_up_at = time.monotonic()
        target.until(lambda: all(future.done() for future in answers), f"clients of {SOLE} have the cause", 60.0)
        late = max(future.result()[1] for future in answers) - given_up_at
        wrong = [text[-300:] for text, _ in (future.result() for future in answers) if str(folder) not in text]
        refusals = [ask(target.urls[0], *bodies()[1])]
        while refusals[-1][0] != 503 and len(refusals) < REFUSALS:  # an API process looks at the farm once a second
            refusals.append(ask(target.urls[0], *bodies()[1]))
        wrong += [text for _, text in refusals if str(folder) not in text]
        if late > CAUSE_WITHIN_S or wrong or refusals[-1][0] != 503:
            raise Harm(f"after {cause!r} the last client knew after {late:.1f} s; {wrong}; then {refusals[-1]}")
    finally:
        unload(target, spec)
        clients.shutdown(wait=False)
    return f"the sole replica's {len(answers)} clients had the cause {max(0.0, late):.1f} s after it was given up"


def unload(target: Target, spec: ModelSpec) -> None:
    desired.unload(target.client, spec.name)
    target.proved(lambda: catalog.get_spec(target.client, spec.name) is None, f"{spec.name} is unloaded")


def give_up(target: Target, random: random.Random) -> str:
    """Give up one of two replicas, whose streams the other continues; then the only replica of a second model."""
    model = target.spec.name
    folder = Path(target.spec.source)
    with two_replicas(target) as names:
        count = running(target, model, names[-1])
        other = names[0]
        lose(target, model, names[-1], folder)
        target.proved(lambda: not running(target, model, names[-1]), f"{other} has the requests of {names[-1]}")
    sole = give_up_the_sole_one(target, folder.with_name("sole-model"))
    return f"{names[-1]} was given up with {count} requests; {sole}"


FAULTS: dict[str, Fault] = {"crash-two-replicas": crash_two_replicas, "given-up": give_up}
