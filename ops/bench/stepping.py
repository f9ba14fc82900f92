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

from control.connection import Call, connect, connect_blocking, run
from control.lease import Lease, acquire
from control.messages import GenerateStep, GenerationRequest, ModelAssets, Sampling
from control.requests import Claims, Emission, EmitResult, Enqueue, Enqueued, enqueue
from worker.engine.step import Sample, StepResult
from worker.exchange import Exchange
from worker.executor import Executor
from worker.grammars import Grammars
from worker.group import Group
from worker.progress import Progress
from worker.pulse import Pulse
from worker.roster import Roster
from worker.scheduling.finish import Finisher
from worker.scheduling.scheduler import Scheduler
from worker.serving import Serving
from worker.siblings import Siblings

MODEL, REPLICA, API = "bench", "r0", "bench"
TOKEN = 12_345
T = TypeVar("T")

PROBE = 1 << 20
"""Bytes hashed to find out how fast that goes."""


def hashing(seconds: float) -> Callable[[], None]:
    """A step's computation, of about `seconds`: one call that leaves the interpreter to others while it computes, as a
    forward in C++ and waiting for a GPU do."""

    def timed(block: bytes) -> float:
        started = time.perf_counter()
        hashlib.sha256(block).digest()
        return time.perf_counter() - started

    probe = bytes(PROBE)
    block = bytes(round(PROBE * seconds / min(timed(probe) for _ in range(100))))

    def work() -> None:
        hashlib.sha256(block).digest()

    return work


class Metronome(Executor):
    """An engine that answers every row with the same token after `work`; `seconds` has how long each of them took."""

    def __init__(self, world_size: int, work: Callable[[], None]) -> None:
        super().__init__(0, world_size, "cpu")
        self._work = work
        self._pending: set[int] = set()
        self.seconds: list[float] = []

    def run_step(self, command: GenerateStep, sample: Sample | None, *_: object) -> StepResult:
        started = time.perf_counter()
        self._work()
        self.seconds.append(time.perf_counter() - started)
        pending = self._pending - set(command.left) - set(command.paused) - set(command.sequences)
        rows = zip(command.sequences, command.sample, strict=True)
        sids = sorted(pending) + [sid for sid, sampled in rows if sampled]
        self._pending = (self._pending - set(command.left)) | set(sids)
        return StepResult(sids, [TOKEN] * len(sids), command.seq, len(sids))


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
    """`seconds` is how long steps took in all: fan-out, handing the last step's tokens over, work, replies."""

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
    """Fan-out, the step's work, and the ranks' replies."""
    work: float

    @property
    def control(self) -> float:
        """All of it that is there for Redis: the rest, besides the work, is the scheduler's and the requests'."""
        return self.exchange + self.group - self.work


@dataclass(frozen=True)
class Loop:
    """A leader with requests under way."""

    serving: Serving
    group: TimedGroup
    exchange: TimedExchange
    engine: Metronome

    def turns(self, count: int) -> list[Turn]:
        """Run `count` more turns."""
        stamps: list[tuple[float, float, float]] = []
        self.engine.seconds.clear()

        def enough() -> bool:
            stamps.append((time.perf_counter(), self.exchange.seconds, self.group.seconds))
            return len(stamps) > count

        self.serving.run(enough)
        spans = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(stamps)]
        return [Turn(*span, work) for span, work in zip(spans, self.engine.seconds, strict=True)]


@contextmanager
def stepping(url: str, rows: int, steps: int, tp: int, work: Callable[[], None], overlap: bool) -> Iterator[Loop]:
    """`rows` requests that go on for at least `steps` steps on an empty server, followed by one API process."""
    with ExitStack() as stack:
        client, pulse_client = (stack.enter_context(closing(connect(url))) for _ in range(2))
        blocking = stack.enter_context(closing(connect_blocking(url)))
        client.flushall()
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
        executor = Metronome(tp, work)
        group = TimedGroup(client, blocking, lease, executor, progress, pulse.check, "127.0.0.1")
        group.ping(60.0)
        scheduler = Scheduler(kv_tokens=rows * (steps + 100), token_budget=512, max_sequences=256)
        exchange = stack.enter_context(TimedExchange(client, blocking, lease, pulse.check))
        roster = Roster(lease, exchange, scheduler, Finisher(lambda ids: ""), Grammars(_no_assets()))
        siblings = Siblings(client, lease)
        serving = Serving(lease, group, scheduler, roster, exchange, progress, pulse.check, siblings)
        serving.gather_s = 0.0  # each step's tokens by themselves, as the limits have it
        if not overlap:
            serving.overlap_below_s = 0.0
        for _ in range(rows):
            run(client, _request(steps + 50))
        serving.run(lambda: roster.busy)
        yield Loop(serving, group, exchange, executor)


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
    words = ["-m", "ops.bench.echo", url, lease.model, lease.replica, str(lease.epoch), str(rank)]
    return subprocess.Popen([sys.executable, *words])


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
