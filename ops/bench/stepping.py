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
from dataclasses import dataclass, field

from control.connection import Call, connect, connect_blocking, run
from control.lease import Lease, acquire
from control.messages import GenerateStep, GenerationRequest, ModelSpec, Sampling
from control.requests import Enqueue, Enqueued, enqueue
from worker.engine.step import Sample, StepResult
from worker.exchange import Exchange
from worker.executor import Executor
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
PIECE = 150_000
"""Bytes hashed in one go, some 0.1 ms: as an engine does, it lets other threads run between kernels and inside them."""


def hashing(pieces: int) -> Callable[[], None]:
    """A step's computation: work that doesn't hold the interpreter, in pieces that do."""
    block = bytes(PIECE)

    def work() -> None:
        for _ in range(pieces):
            hashlib.sha256(block).digest()

    return work


class Metronome(Executor):
    """An engine that answers every row with the same token after `work`."""

    def __init__(self, world_size: int, work: Callable[[], None]) -> None:
        super().__init__(0, world_size, "cpu")
        self._work = work
        self._pending: set[int] = set()

    def run_step(self, command: GenerateStep, sample: Sample | None) -> StepResult:
        self._work()
        pending = self._pending - set(command.left) - set(command.paused) - set(command.sequences)
        rows = zip(command.sequences, command.sample, strict=True)
        sids = sorted(pending) + [sid for sid, sampled in rows if sampled]
        self._pending = (self._pending - set(command.left)) | set(sids)
        return StepResult(sids, [TOKEN] * len(sids), command.seq, len(sids))


class TimedExchange(Exchange):
    """Remembers how long each of its round trips took, in seconds."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.seconds: list[float] = []

    def emit(self, *args: object) -> object:  # type: ignore[override]
        started = time.perf_counter()
        try:
            return super().emit(*args)  # type: ignore[arg-type]
        finally:
            self.seconds.append(time.perf_counter() - started)


@dataclass
class Loop:
    """A leader with `rows` requests under way. `turns` are the seconds of each turn of its loop, `group` those of
    fan-out, computation and replies."""

    serving: Serving
    group: Group
    exchange: TimedExchange
    turns: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    def turn(self, count: int) -> None:
        """Run `count` more turns."""
        self.turns.clear(), self.together.clear(), self.exchange.seconds.clear()
        stamps: list[float] = []

        def enough() -> bool:
            stamps.append(time.perf_counter())
            self.together.append(self.group.last_seconds)
            return len(stamps) > count

        self.serving.run(enough)
        self.turns = [b - a for a, b in itertools.pairwise(stamps)]
        del self.together[0]


@contextmanager
def stepping(url: str, rows: int, steps: int, tp: int, work: Callable[[], None]) -> Iterator[Loop]:
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
        group = Group(client, blocking, lease, executor, progress, pulse.check, "127.0.0.1")
        group.ping(60.0)
        scheduler = Scheduler(kv_tokens=rows * (steps + 100), token_budget=512, max_sequences=256)
        exchange = TimedExchange(client, blocking, lease, pulse.check)
        roster = Roster(lease, exchange, scheduler, Finisher(lambda ids: ""))
        siblings = Siblings(client, lease, ModelSpec(name=MODEL, source=""))
        for _ in range(rows):
            run(client, _request(steps + 50))
        yield Loop(Serving(lease, group, scheduler, roster, exchange, progress, pulse.check, siblings), group, exchange)


def _request(tokens: int) -> Call[Enqueued]:
    params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=tokens, temperature=0.0))
    return enqueue(Enqueue(rid=uuid.uuid4().hex, model=MODEL, params=params, tenant="bench", api=API))


def _echo(url: str, lease: Lease, rank: int) -> subprocess.Popen[bytes]:
    words = ["-m", "ops.bench.echo", url, lease.model, lease.replica, str(lease.epoch), str(rank)]
    return subprocess.Popen([sys.executable, *words])


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
