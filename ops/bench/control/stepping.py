"""A leader's real step loop on a real server, around an engine that costs nothing or a known amount."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
import uuid
from collections import abc
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from control.commands import BatchChange, GenerateStep, LoadDenseShard, StepImage
from control.messages import GenerationRequest, Sampling
from control.redis.connection import Call, connect, connect_blocking, run
from control.replicas.lease import acquire
from control.requests import Claims, Emission, Enqueue, Enqueued, enqueue
from ops.bench.control.echo import echo
from ops.harness.processes import calling
from worker.engine.step import Forward, Step
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.exchange import DeadReplicas, EmissionAnswer, Exchange, RedisCalls
from worker.leader.group import Group
from worker.leader.scheduled_requests import ScheduledRequests
from worker.leader.serving import Serving, ServingContext
from worker.rank.heartbeat import Heartbeat, Progress
from worker.rank.rank_worker import RankWorker
from worker.repository.files import inspect, is_gguf
from worker.sampling.grammars import Grammars
from worker.sampling.sampler import StepSampler, StepTokens
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Finisher, Sequence

MODEL = "bench"
REPLICA = "r0"
API = "bench"
TOKEN = 12_345
T = TypeVar("T")

_NO_LOGITS = torch.empty(0)


class Clocked(RankWorker):
    """`steps` has what each command's forwards came to."""

    def __init__(self, rank: int, world_size: int, device: str) -> None:
        super().__init__(rank, world_size, device)
        self.steps: list[Forwards] = []


class Metronome(Clocked):
    """An engine whose forwards are calls of `work`."""

    def __init__(self, world_size: int, work: Callable[[], object]) -> None:
        super().__init__(0, world_size, "cpu")
        self._work = work
        self._pending: set[int] = set()

    @contextmanager
    def step(self, command: GenerateStep) -> Generator[MetronomeStep]:  # type: ignore[override]
        change = command.change
        rows = {row.sid: row.sample for row in change.rows}
        sids = sorted(self._pending.difference(change.left, change.paused, rows))
        sids += [sid for sid, sampled in rows.items() if sampled]
        self._pending = self._pending.difference(change.left).union(sids)
        step = MetronomeStep(command.seq, Forward(sids, _NO_LOGITS), self._work)
        yield step
        self.steps.append(Forwards(step.forwards, step.seconds))


@dataclass(slots=True)
class MetronomeStep:
    """In place of an engine's step."""

    checksum: int
    _forward: Forward
    _work: Callable[[], object]
    forwards: int = 0
    seconds: float = 0.0

    def forward(self, _targets: object) -> Forward:
        self.seconds += timed(self._work)
        self.forwards += 1
        return self._forward

    def run_ahead(self, _tokens: object) -> None:
        """There is nothing to launch."""

    def agree(self, _tokens: list[int], *, more: bool) -> bool:
        return more


class SameToken(StepSampler):
    """Samples the same token for every row, without logits."""

    def begin(self, rows: list[Sequence], forward: Forward) -> Sampled:  # type: ignore[override]
        return Sampled(len(rows))


@dataclass(frozen=True, slots=True)
class Sampled:
    """In place of tokens under way."""

    rows: int
    on_device: None = None

    def wait(self) -> StepTokens:
        return StepTokens([TOKEN] * self.rows)


@dataclass(slots=True)
class Forwards:
    """Those of one command: how many, and seconds of all of them."""

    count: int = 0
    work: float = 0.0


class TimedExchange(Exchange):
    """`seconds` is for how long it kept the step loop waiting, in all, and for how long offers were made."""

    seconds = 0.0

    def deliver(self, emissions: list[Emission], claim: Call[Claims] | None) -> EmissionAnswer:
        started = time.perf_counter()
        answer = super().deliver(emissions, claim)
        self.seconds += time.perf_counter() - started
        return answer

    def finish(self) -> EmissionAnswer | None:
        started = time.perf_counter()
        answer = super().finish()
        self.seconds += time.perf_counter() - started
        return answer


class TimedGroup(Group):
    """`seconds` is how long commands took beside the leader's own part: fan-out and replies."""

    seconds = 0.0

    @contextmanager
    def step(self, change: BatchChange, repeat: bool = False, images: abc.Sequence[StepImage] = ()) -> Generator[Step]:
        started = time.perf_counter()
        with super().step(change, repeat, images) as step:
            self.seconds += time.perf_counter() - started
            yield step
            started = time.perf_counter()
        self.seconds += time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Turn:
    """The parts of the time of one turn of the step loop, in seconds."""

    whole: float
    exchange: float
    """Of what goes to Redis and comes from it, tokens and claims: making offers, and waiting."""
    group: float
    """Fan-out, and the ranks' replies."""
    forwards: Forwards

    @property
    def control(self) -> float:
        """All of it that is there for Redis: the rest, besides the work, is the scheduler's and the requests'."""
        return self.exchange + self.group

    @property
    def books(self) -> float:
        """Of the scheduler and the requests."""
        return self.whole - self.control - self.forwards.work


@dataclass(frozen=True)
class SteppingLoop:
    """A leader with requests under way."""

    serving: Serving
    running: ScheduledRequests
    group: TimedGroup
    exchange: TimedExchange
    engine: Clocked

    def _stamp(self) -> tuple[float, float, float]:
        return time.perf_counter(), self.exchange.seconds, self.group.seconds

    def turns(self, count: int) -> list[Turn]:
        """Run `count` more turns."""
        stamps: list[tuple[float, float, float]] = []
        self.engine.steps.clear()

        stamps.append(self._stamp())
        for _ in range(count):
            self.serving.turn()
            stamps.append(self._stamp())
        self.serving.deliver()
        spans = [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(stamps)]
        parts = zip(spans, self.engine.steps, strict=True)
        return [Turn(whole, exchange, group, forwards) for (whole, exchange, group), forwards in parts]


@contextmanager
def stepping(
    url: str, rows: int, steps: int, engine: Clocked, overlap: bool, gather: bool = False, repeat: bool = False
) -> Generator[SteppingLoop]:
    """`rows` requests that go on for at least `steps` steps on an empty server, followed by one API process.

    Without `gather` each step's tokens go out by themselves, as the limits have it; with `repeat` a command has several
    forwards where it may.
    """
    with ExitStack() as stack:
        client, heartbeat_client = (stack.enter_context(closing(connect(url))) for _ in range(2))
        blocking = stack.enter_context(closing(connect_blocking(url)))
        client.flushall()
        tp = engine.world_size
        lease = run(client, acquire(MODEL, REPLICA, "bench/1", tp))
        assert lease is not None, "the server is empty, and this process is its only user"
        for rank in range(1, tp):
            place = {"url": url, "model": MODEL, "replica": REPLICA, "epoch": lease.epoch, "rank": rank}
            stack.enter_context(calling(os.sched_getaffinity(0), echo, **place))
        events = stack.enter_context(closing(connect(url))).pubsub()
        events.subscribe(f"furrow:{{{MODEL}}}:events:{API}")
        progress = Progress()
        progress.phase = "ready"
        heartbeat = Heartbeat(heartbeat_client, MODEL, REPLICA, lease.epoch, 0, tp, "cpu", progress, lease)
        stack.enter_context(heartbeat)
        group = TimedGroup(client, blocking, lease, engine, progress, heartbeat.check, "127.0.0.1")
        stack.enter_context(group)
        group.ping(60.0)
        scheduler = Scheduler(kv_tokens=rows * (steps + 100), token_budget=512, max_sequences=256)
        calls = RedisCalls(client, blocking, lease, heartbeat.check)
        exchange = TimedExchange(lease, calls, DeadReplicas(client, lease))
        stack.enter_context(exchange)
        isolation = CrashIsolation(lease, calls.run)
        running = ScheduledRequests(scheduler, Finisher(lambda ids: ""), Grammars(Future[Any], []), isolation)
        context = ServingContext(
            lease=lease,
            group=group,
            running=running,
            exchange=exchange,
            progress=progress,
            check=heartbeat.check,
            sampler=SameToken() if isinstance(engine, Metronome) else StepSampler(),
        )
        serving = Serving(context)
        _time_emissions(serving, exchange)
        if not gather:
            exchange.gather_s = 0.0
        if not overlap:
            serving.overlap_below_s = 0.0
        if not repeat:
            serving.repeat_within_s = 0.0
        for _ in range(rows):
            run(client, _request(steps + 50))
        while not serving.busy:
            serving.turn()
        yield SteppingLoop(serving, running, group, exchange, engine)


def _time_emissions(serving: Serving, exchange: TimedExchange) -> None:
    emit = serving.emit

    def timed_emit(step_s: float) -> None:
        exchange.seconds += timed(lambda: emit(step_s))

    serving.emit = timed_emit  # type: ignore[method-assign]


def _request(tokens: int) -> Call[Enqueued]:
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=tokens, temperature=0.0))
    return enqueue(Enqueue(rid=uuid.uuid4().hex, model=MODEL, params=params, tenant="bench", api=API))


# --- the work of a step without a model -------------------------------------------------------------------------------

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


# --- a model ----------------------------------------------------------------------------------------------------------


def load_command(
    model: Path, model_id: str, kv_tokens: int, dtype: str = "float32", quant: str | None = None
) -> LoadDenseShard:
    """The first one of epoch 1. `model` is a folder or a GGUF file. Raises ModelFilesError."""
    if is_gguf(model):
        files = inspect(model)
        config = json.dumps(files.config)
        weights = files.weights
    else:
        config = (model / "config.json").read_text()
        weights = sorted(model.glob("*.safetensors"))
    return LoadDenseShard(
        epoch=1,
        seq=1,
        model_id=model_id,
        config_json=config,
        safetensors_paths=[str(path) for path in weights],
        dtype=dtype,
        quant=quant,
        kv_tokens=kv_tokens,
    )
