"""A leader's real step loop on a real server, around an engine that costs nothing or a known amount."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from control.messages import GenerateStep, GenerationRequest, ModelAssets, Sampling
from control.redis.connection import Call, connect, connect_blocking, run
from control.replicas.lease import Lease, acquire
from control.requests import Claims, Emission, EmitResult, Enqueue, Enqueued, enqueue
from worker.engine.step import GoesOn, Sample, StepResult
from worker.health.progress import Progress
from worker.health.pulse import Pulse
from worker.leader.exchange import Exchange
from worker.leader.roster import Roster
from worker.leader.serving import Serving
from worker.leader.siblings import Siblings
from worker.sampling.grammars import Grammars
from worker.scheduling.finish import Finisher
from worker.scheduling.scheduler import Scheduler
from worker.tp_group.executor import Executor
from worker.tp_group.group import Group

MODEL, REPLICA, API = "bench", "r0", "bench"
TOKEN = 12_345
T = TypeVar("T")

PROBE = 1 << 20
"""Bytes hashed to find out how fast that goes."""


def hashing(seconds: float) -> Callable[[], object]:
    """A step's computation, of about `seconds`: one call that leaves the interpreter to others while it computes, as a
    forward in C++ and waiting for a GPU do."""
    probe = bytes(PROBE)
    fastest = min(timed(lambda: hashlib.sha256(probe)) for _ in range(100))
    block = bytes(round(PROBE * seconds / fastest))
    return lambda: hashlib.sha256(block)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Clocked(Executor):
    """`steps` has what each command's forwards came to."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        super().__init__(rank, world_size, device)
        self.steps: list[Forwards] = []


class Metronome(Clocked):
    """An engine that answers every row with the same token after `work`. With `repeats` it runs several forwards
    for one command where it may, as real ones do with several ranks."""

    def __init__(self, world_size: int, work: Callable[[], object], repeats: bool) -> None:
        super().__init__(0, world_size, "cpu")
        self._work, self._repeats = work, repeats
        self._pending: set[int] = set()

    def run_step(
        self, command: GenerateStep, sample: Sample | None, goes_on: GoesOn | None = None, score: object = None
    ) -> StepResult:
        pending = self._pending - set(command.left) - set(command.paused) - set(command.sequences)
        rows = zip(command.sequences, command.sample, strict=True)
        sids = sorted(pending) + [sid for sid, sampled in rows if sampled]
        self._pending = (self._pending - set(command.left)) | set(sids)
        tokens, done = [TOKEN] * len(sids), Forwards()
        while True:
            done.work += timed(self._work)
            done.count += 1
            booked = time.perf_counter()
            more = self._repeats and goes_on is not None and goes_on(tokens)
            done.books += time.perf_counter() - booked
            if not more:
                break
        self.steps.append(done)
        return StepResult(sids, tokens, command.seq, len(sids), done.count)


@dataclass(slots=True)
class Forwards:
    """Those of one command: how many, and seconds of all of them."""

    count: int = 0
    work: float = 0.0
    books: float = 0.0
    """Of the leader, between two of them."""


class TimedExchange(Exchange):
    """`seconds` is for how long it kept the step loop waiting, in all."""

    seconds = 0.0

    def deliver(self, rows: list[Emission], claim: Call[Claims] | None) -> tuple[EmitResult, Claims | None]:
        started = time.perf_counter()
        answer = super().deliver(rows, claim)
        self.seconds += time.perf_counter() - started
        return answer

    def finish(self) -> tuple[EmitResult, Claims | None] | None:
        started = time.perf_counter()
        answer = super().finish()
        self.seconds += time.perf_counter() - started
        return answer


class TimedGroup(Group):
    """`seconds` is how long commands took in all: fan-out, handing the last tokens over, work, replies."""

    seconds = 0.0

    def step(self, *arguments: Any) -> StepResult:
        started = time.perf_counter()
        result = super().step(*arguments)
        self.seconds += time.perf_counter() - started
        return result


@dataclass(frozen=True, slots=True)
class Turn:
    """Where the time of one turn of the step loop went, in seconds."""

    whole: float
    exchange: float
    """Waiting for what goes to Redis and comes from it: tokens and claims."""
    group: float
    """Fan-out, the command's forwards, and the ranks' replies."""
    forwards: Forwards

    @property
    def control(self) -> float:
        """All of it that is there for Redis: the rest, besides the work, is the scheduler's and the requests'."""
        return self.exchange + self.group - self.forwards.work - self.forwards.books

    @property
    def books(self) -> float:
        """Of the scheduler and the requests."""
        return self.whole - self.control - self.forwards.work


@dataclass(frozen=True)
class Loop:
    """A leader with requests under way."""

    serving: Serving
    group: TimedGroup
    exchange: TimedExchange
    engine: Clocked

    def turns(self, count: int) -> list[Turn]:
        """Run `count` more turns."""
        stamps: list[tuple[float, float, float]] = []
        self.engine.steps.clear()

        def enough() -> bool:
            stamps.append((time.perf_counter(), self.exchange.seconds, self.group.seconds))
            return len(stamps) > count

        self.serving.run(enough)
        spans = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(stamps)]
        return [Turn(*span, forwards) for span, forwards in zip(spans, self.engine.steps, strict=True)]


@contextmanager
def stepping(url: str, rows: int, steps: int, engine: Clocked, overlap: bool, gather: bool = False) -> Iterator[Loop]:
    """`rows` requests that go on for at least `steps` steps on an empty server, followed by one API process.

    Without `gather` each step's tokens go out by themselves, as the limits have it.
    """
    with ExitStack() as stack:
        client, pulse_client = (stack.enter_context(closing(connect(url))) for _ in range(2))
        blocking = stack.enter_context(closing(connect_blocking(url)))
        client.flushall()
        tp = engine.world_size
        lease = run(client, acquire(MODEL, REPLICA, "bench/1", tp))
        assert lease is not None, "the server is empty, and this process is its only user"
        for rank in range(1, tp):
            stack.callback(_ended, _echo(url, lease, rank))
        events = stack.enter_context(closing(connect(url))).pubsub()
        events.subscribe(f"furrow:{{{MODEL}}}:events:{API}")
        progress = Progress()
        progress.phase = "ready"
        pulse = Pulse(pulse_client, MODEL, REPLICA, lease.epoch, 0, tp, "cpu", progress, lease)
        stack.enter_context(pulse)
        group = stack.enter_context(TimedGroup(client, blocking, lease, engine, progress, pulse.check, "127.0.0.1"))
        group.ping(60.0)
        scheduler = Scheduler(kv_tokens=rows * (steps + 100), token_budget=512, max_sequences=256)
        exchange = stack.enter_context(TimedExchange(client, blocking, lease, pulse.check))
        roster = Roster(lease, exchange, scheduler, Finisher(lambda ids: ""), Grammars(_no_assets()))
        siblings = Siblings(client, lease)
        serving = Serving(lease, group, scheduler, roster, exchange, progress, pulse.check, siblings)
        if not gather:
            serving.gather_s = 0.0
        if not overlap:
            serving.overlap_below_s = 0.0
        for _ in range(rows):
            run(client, _request(steps + 50))
        serving.run(lambda: roster.busy)
        yield Loop(serving, group, exchange, engine)


def _no_assets() -> ModelAssets:
    """Of a model without words."""
    return ModelAssets(
        tokenizer_json="{}",
        tokenizer_config={},
        chat_template=None,
        generation_config={},
        context_length=1,
        vocab_size=1,
        eos_ids=[],
        kv_tokens=1,
        created=0,
    )


def _request(tokens: int) -> Call[Enqueued]:
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=tokens, temperature=0.0))
    return enqueue(Enqueue(rid=uuid.uuid4().hex, model=MODEL, params=params, tenant="bench", api=API))


def _echo(url: str, lease: Lease, rank: int) -> subprocess.Popen[bytes]:
    words = ["-m", "ops.bench.control.echo", url, lease.model, lease.replica, str(lease.epoch), str(rank)]
    return subprocess.Popen([sys.executable, *words])


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
