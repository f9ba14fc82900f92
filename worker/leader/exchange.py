"""All calls of a leader to Redis: it reads claims, logs and images, and writes the emissions of steps.

`Exchange` returns what Redis answered, and the step loop applies it; it has no access to running requests.

The round trip of an emission may run on a thread of its own while the next step is computed. The step loop takes its
answer before it starts another round trip, so the leader is at most one step ahead of Redis. The work for Redis would
else be 4 to 7 % of a step of 4 ms, with a second rank 13 to 23 %. The next command is not sent before the replies to
the last one, because a fault could then belong to either step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any, Generic, TypeVar

import structlog
from redis import RedisError

from control import requests
from control.errors import FurrowError, Lost, RedisUnavailable
from control.keys import CLASSES
from control.messages import GenerationRequest, LogEntry, RequestState
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run, run_every
from control.redis.outage import outage
from control.replicas.commands import wait_for_work
from control.replicas.health import status_of
from control.replicas.lease import Lease, holder, renew
from control.requests import (
    PAGE_ENTRIES,
    Adopted,
    Claimed,
    Claims,
    Emission,
    EmitResult,
    Inheritance,
    read_image,
    read_log,
    read_params,
)
from worker.detectors import REPLICA_GONE_S
from worker.leader.request import RunningRequest
from worker.leader.running_requests import Capacity
from worker.scheduling.sequence import NeededImage

T = TypeVar("T")

log = structlog.get_logger()

LOOP = "leader"
"""Name of this loop in log lines about an outage of Redis."""
AWAY_S = 0.2
"""Pause between two attempts of a call while Redis is away."""
LEAVE_S = 1.0
"""Time for the round trip under way to finish at the end of an epoch."""
LOOK_EVERY_S = 1.0
"""Interval of the looks at other replicas."""
GATHER_S = 0.04
"""Longest time between two emissions of a stream whose steps are shorter: such steps are emitted together, unless one
has a first or a last token."""
CHANNELS = 3
"""Bytes of a pixel: red, green and blue."""
AT_ONCE = 4 * PAGE_ENTRIES
"""Log entries that the step loop reads itself after a claim. A thread reads the other logs."""
BATCH = 32
"""Requests whose parameters and short logs are read in one round trip."""


class RedisCalls:
    """The calls of one epoch. A call waits while Redis is away; `check` raises EpochOver when the epoch is over. A lock
    that ran out meanwhile is acquired again unless another leader had it."""

    def __init__(
        self, client: SyncRedis, blocking: SyncRedis, lease: Lease, check: Callable[[], None], world_size: int = 1
    ) -> None:
        self._client = client
        self._blocking = blocking
        self._lease = lease
        self._check = check
        self._world_size = world_size
        self._was_away = False

    def try_once(self, call: Call[T]) -> T:
        """Make one call. Raises RedisUnavailable."""
        return run(self._client, call)

    def try_every(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make calls in one round trip, from any thread. Raises RedisUnavailable."""
        return run_every(self._client, calls)

    def run(self, call: Call[T]) -> T:
        """Make one call, and repeat it until Redis answers."""
        return self.retry(lambda: run(self._client, call))

    def retry(self, attempt: Callable[[], T], first: Callable[[], T] | None = None) -> T:
        """Repeat `attempt` until Redis answers: the tokens of a finished step are not lost in an outage. `first` gives
        the result of an attempt that was made already."""
        current = first or attempt
        waited = False
        while True:
            try:
                answer = current()
                if waited:
                    outage.goes_on(LOOP)
                return answer
            except Lost as lost:  # a script checks the lock first, so nothing was changed
                self._was_away = True
                self._check()
                self._acquire_again(lost)
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
                self._was_away = True
                self._check()
                time.sleep(AWAY_S)
            waited = True
            current = attempt

    def _acquire_again(self, lost: Lost) -> None:
        """Acquire the lock that ran out, unless the heartbeat's thread has done so. Raises Lost or Fenced."""
        try:
            if run(self._client, renew(self._lease, self._world_size)):
                log.warning("the lock ran out and was taken again", reason=str(lost), action="renew")
        except RedisUnavailable as error:  # the next attempt waits for Redis
            outage.waits(LOOP, error)

    def was_away(self) -> bool:
        """True if Redis was away since the last call of this method. Its data may be older than before."""
        was_away = self._was_away
        self._was_away = False
        return was_away

    def wait_for_work(self, bell: str, block_ms: int) -> None:
        """Return when a request, a cancel or poison has come since the wake-up `bell`, or after `block_ms`."""
        try:
            wait_for_work(self._blocking, self._lease, bell, block_ms)
        except RedisUnavailable:
            time.sleep(AWAY_S)


@dataclass(frozen=True, slots=True)
class EmissionAnswer:
    """The emissions of one round trip, and what Redis answered to them and to the claim beside them."""

    emissions: list[Emission]
    result: EmitResult
    claims: Claims | None


class Exchange:
    """One epoch's exchange with Redis. A method that waits for Redis raises EpochOver when the epoch ends.

    A context manager: at the end of the epoch the round trip under way gets LEAVE_S. If that is too short, the next
    epoch computes the step again.
    """

    def __init__(self, lease: Lease, calls: RedisCalls, dead_replicas: DeadReplicas) -> None:
        self.reader = RequestReader(lease, calls)
        self.dead_replicas = dead_replicas
        self._lease = lease
        self._calls = calls
        self._background: BackgroundCall[EmissionAnswer] = BackgroundCall("exchange")
        self._under_way: Callable[[], EmissionAnswer] | None = None
        self._emitted_at = 0.0
        self._bell = "0"
        """The id of the last wake-up before the latest claim."""
        self._skip = 0
        """As the latest claim returned it."""
        self.gather_s = GATHER_S
        self.answers = 0
        """Number of emissions that Redis has answered, of steps that every rank has acknowledged."""
        self.others_wait = False
        """True if requests that no leader has were waiting when Redis answered the last emission."""

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.close()
        if self._under_way is not None:
            self._under_way = None
            self._background.wait(LEAVE_S)
        self._background.close()

    def was_away(self) -> bool:
        """As `RedisCalls.was_away`."""
        return self._calls.was_away()

    # --- emissions out ----------------------------------------------------------------------------------------------

    def gathered(self, step_s: float) -> bool:
        """True if the tokens of a further step, which takes `step_s`, would come too late for the next emission."""
        return time.monotonic() - self._emitted_at + step_s > self.gather_s

    def start(self, emissions: list[Emission], claim: Call[Claims] | None) -> None:
        """Begin to emit, and to claim in the same round trip; `finish` returns the answer."""
        self._under_way = self._round_trip(emissions, claim)
        self._background.send(self._under_way)

    def finish(self) -> EmissionAnswer | None:
        """Wait for the answer to what `start` began; None where nothing is under way."""
        round_trip = self._under_way
        if round_trip is None:
            return None
        self._under_way = None
        return self._note(self._calls.retry(round_trip, first=self._background.answer))

    def deliver(self, emissions: list[Emission], claim: Call[Claims] | None) -> EmissionAnswer:
        """Emit, and claim in the same round trip."""
        return self._note(self._calls.retry(self._round_trip(emissions, claim)))

    def emit_end(self, request: RunningRequest, state: RequestState) -> list[tuple[Emission, int]]:
        """Emit the end of one request outside a step. Returns the emissions that Redis accepted, each with the time in
        ms of Redis's clock."""
        accepted: list[tuple[Emission, int]] = []
        is_done = False
        while not is_done:
            emission = request.emission(state)
            result = self._calls.run(requests.emit(self._lease, [emission]))
            expected = result.behind.get(request.rid)
            if expected is not None:
                request.send_again(emission, expected)
            else:
                request.emitted(emission)
                accepted.append((emission, result.accepted_ms))
                is_done = emission.done is not None
        return accepted

    def _round_trip(self, emissions: list[Emission], claim: Call[Claims] | None) -> Callable[[], EmissionAnswer]:
        """A round trip that may be made again after an outage: the scripts recognise what they have done already."""
        self._emitted_at = time.monotonic()
        calls: list[Call[Any]] = []

        def send() -> EmissionAnswer:
            if not calls:
                calls.extend(requests.emit_all(self._lease, emissions))
                if claim is not None:
                    calls.append(claim)
            answers = self._calls.try_every(calls)
            claims = None if claim is None else answers.pop()
            return EmissionAnswer(emissions, requests.merged(answers), claims)

        return send

    def _note(self, answer: EmissionAnswer) -> EmissionAnswer:
        self.answers += 1
        self.others_wait = answer.result.waiting > 0
        if answer.claims is not None:
            self._note_claims(answer.claims)
        return answer

    # --- claims in --------------------------------------------------------------------------------------------------

    def claim(self, capacity: Capacity) -> Call[Claims]:
        """The call that claims requests for `capacity`."""
        return requests.claim(
            self._lease,
            capacity.requests,
            capacity.tokens,
            capacity.prefill_tokens,
            self._skip,
            capacity.guests,
            capacity.sated,
        )

    def claim_now(self, capacity: Capacity) -> Claims:
        """Claim in a round trip of its own."""
        claims = self._calls.run(self.claim(capacity))
        self._note_claims(claims)
        return claims

    def adopt(self) -> list[Claimed]:
        """All requests that are this replica's in Redis, in the order of their first claims."""
        return self._in_batches(lambda after: requests.adopt(self._lease, after))

    def read(self, claims: Iterable[Claimed]) -> None:
        """Begin to read the parameters and logs of claimed requests."""
        self.reader.add(claims)

    def arrived(self) -> list[RunningRequest]:
        """The requests that have been read since the last call. One that can't be read becomes a dead letter."""
        arrived: list[RunningRequest] = []
        for result in self.reader.take():
            if isinstance(result, Unreadable):
                self._calls.run(requests.bury(self._lease, result.rid, result.cause))
            else:
                arrived.append(result)
        return arrived

    def publish(self, call: Call[Any]) -> None:
        """Write something about the replica, as soon as Redis is there."""
        self._calls.run(call)

    def wait_for_work(self, block_ms: int) -> None:
        """Return when there may be a request to claim, to cancel or to end, or after `block_ms`."""
        self._calls.wait_for_work(self._bell, block_ms)

    def requeue(self, rid: str) -> None:
        """Put a request back into its queue, from which another epoch continues it. Raises RedisUnavailable."""
        self._calls.try_once(requests.requeue(self._lease, rid))

    def _note_claims(self, claims: Claims) -> None:
        self._bell = claims.bell
        self._skip = claims.skip

    def _in_batches(self, call: Callable[[str], Call[Adopted]]) -> list[Claimed]:
        claims: list[Claimed] = []
        after = ""
        more = True
        while more:
            batch = self._calls.run(call(after))
            claims += batch.requests
            self._bell = batch.bell
            after = batch.after
            more = batch.more
        return sorted(claims, key=lambda claim: (CLASSES.index(claim.priority), claim.claimed_ms, claim.rid))

    # --- requests of replicas that are gone -------------------------------------------------------------------------

    def gone_replicas(self) -> list[str]:
        """As `DeadReplicas.gone`."""
        return self._calls.retry(self.dead_replicas.gone)

    def inherit(self, replica: str) -> Inheritance:
        """Take over the crash record of a replica that is gone."""
        return self._calls.run(requests.inherit(self._lease, replica))

    def take_over(self, replica: str) -> list[Claimed]:
        """All requests of a replica that is gone."""
        return self._in_batches(lambda after: requests.takeover(self._lease, replica, after))

    # --- images in --------------------------------------------------------------------------------------------------

    def read_pixels(self, images: Iterable[NeededImage]) -> dict[str, bytes]:
        """The pixels of the images by digest, as rows of red, green and blue. An image that Redis has lost is left
        out."""
        pixels: dict[str, bytes] = {}
        for needed in images:
            if needed.image.digest not in pixels:
                data = self._read_pixels(needed)
                if data is not None:
                    pixels[needed.image.digest] = data
        return pixels

    def _read_pixels(self, needed: NeededImage) -> bytes | None:
        size = needed.image.height * needed.image.width * CHANNELS
        pieces: list[bytes] = []
        for call in read_image(self._lease.model, needed.rid, needed.index, size):  # one by one: each answer is large
            piece = self._calls.run(call)
            if piece is None:
                return None
            pieces.append(piece)
        return b"".join(pieces)


@dataclass(frozen=True)
class Unreadable:
    """A claimed request whose parameters or log can't be decoded, and the cause."""

    rid: str
    cause: str


ReadResult = tuple[Claimed, RunningRequest | Unreadable | None]
"""None: Redis has no such request any more."""


class RequestReader:
    """Reads the parameters and logs of one epoch's claimed requests, long logs in a thread beside the step loop.

    The step loop calls `add` with claimed requests and `take` for those that have been read. The thread shares two
    queues with it. Only the owner of a request appends to its log, so a log that is read page by page has no gaps. A
    request that another leader took meanwhile is refused at its first emission.
    """

    def __init__(self, lease: Lease, calls: RedisCalls) -> None:
        self._model = lease.model
        self._calls = calls
        self._claimed: dict[str, Claimed] = {}
        self._ready: list[ReadResult] = []
        self._claims: SimpleQueue[Claimed | None] = SimpleQueue()
        """The thread's input; None ends it."""
        self._results: SimpleQueue[ReadResult | Exception] = SimpleQueue()
        """The thread's output."""
        self._closed = Event()
        self._thread: Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._claimed)

    @property
    def rids(self) -> set[str]:
        """The claimed requests that have not been read."""
        return set(self._claimed)

    def has(self, claimed: Claimed) -> bool:
        """True if the request is being read by this very claim."""
        present = self._claimed.get(claimed.rid)
        return present is not None and present.attempts == claimed.attempts

    def add(self, claims: Iterable[Claimed]) -> None:
        """Begin to read. Requests with short logs are ready when this returns; the thread reads the others, the
        shortest log first."""
        entries = 0
        at_once: list[Claimed] = []
        for claimed in sorted(claims, key=lambda claimed: claimed.seq):
            self._claimed[claimed.rid] = claimed
            entries += claimed.seq
            if claimed.seq < PAGE_ENTRIES and entries <= AT_ONCE:
                at_once.append(claimed)
            else:
                self._claims.put(claimed)
                self._start()
        for start in range(0, len(at_once), BATCH):
            self._ready += self._read_batch(at_once[start : start + BATCH])

    def _read_batch(self, batch: list[Claimed]) -> list[ReadResult]:
        """Read requests with short logs. One that can't be decoded does not affect the others."""
        try:
            return self._calls.retry(lambda: self._read_short(batch))
        except (FurrowError, RedisError):
            raise
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0], _unreadable(batch[0], error))]
            return [result for claimed in batch for result in self._read_batch([claimed])]

    def take(self) -> list[RunningRequest | Unreadable]:
        """The requests that have been read since the last call, in order. One that Redis has lost is dropped."""
        results = self._ready
        self._ready = []
        while True:
            try:
                result = self._results.get_nowait()
            except Empty:
                break
            if isinstance(result, Exception):
                raise result
            results.append(result)
        arrived: list[RunningRequest | Unreadable] = []
        for claimed, request in results:
            if self._claimed.get(claimed.rid) is not claimed:  # dropped, or claimed again meanwhile
                continue
            del self._claimed[claimed.rid]
            if request is not None:
                arrived.append(request)
            else:
                log.info("a claimed request is gone", rid=claimed.rid, action="read_request")
        return arrived

    def drop(self, rid: str) -> None:
        """The request is not this leader's any more."""
        self._claimed.pop(rid, None)

    def wait(self, seconds: float) -> None:
        """Return when a request has been read, or after `seconds`."""
        if self._ready or not self._claimed:
            return
        try:
            result = self._results.get(timeout=seconds)
        except Empty:
            return
        if isinstance(result, Exception):
            raise result
        self._ready.append(result)

    def close(self) -> None:
        """End the thread after the page under way."""
        self._closed.set()
        self._claims.put(None)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=copy_context().run, args=(self._run,), name="reading", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (claimed := self._claims.get()) is not None and not self._closed.is_set():
            try:
                self._results.put((claimed, self._read_long(claimed)))
            except (FurrowError, RedisError) as error:  # `take` raises it
                self._results.put(error)
            except Exception as error:
                self._results.put((claimed, _unreadable(claimed, error)))

    def _read_long(self, claimed: Claimed) -> RunningRequest | None:
        began = time.monotonic()
        [params] = self._retry([read_params(self._model, claimed.rid)])
        request = None if params is None else RunningRequest.begin(claimed, params)
        while request is not None and not self._closed.is_set():
            [page] = self._retry([read_log(self._model, claimed.rid, request.accepted)])
            request.replay(page)
            if len(page) < PAGE_ENTRIES:
                break
        seconds = round(time.monotonic() - began, 3)
        log.info("read a token log", rid=claimed.rid, entries=claimed.seq, seconds=seconds, action="read_request")
        return request

    def _retry(self, calls: list[Call[GenerationRequest | None]] | list[Call[list[LogEntry]]]) -> list[Any]:
        """Make calls in one round trip, and repeat them until Redis answers or the epoch ends."""
        while True:
            try:
                return self._calls.try_every(calls)
            except RedisUnavailable:
                if self._closed.wait(AWAY_S):
                    raise

    def _read_short(self, batch: list[Claimed]) -> list[ReadResult]:
        params = [read_params(self._model, claimed.rid) for claimed in batch]
        logged = [claimed for claimed in batch if claimed.seq]
        logs = [read_log(self._model, claimed.rid, 0) for claimed in logged]
        answers = self._calls.try_every([*params, *logs])
        pages = dict(zip([claimed.rid for claimed in logged], answers[len(batch) :], strict=True))
        results: list[ReadResult] = []
        for claimed, stored in zip(batch, answers, strict=False):
            request = None if stored is None else RunningRequest.begin(claimed, stored)
            if request is not None:
                request.replay(pages.get(claimed.rid, []))
            results.append((claimed, request))
        return results


def _unreadable(claimed: Claimed, error: Exception) -> Unreadable:
    """To be called while `error` is handled, so that the log has its traceback."""
    log.exception("a request can't be read", rid=claimed.rid, action="read_request")
    return Unreadable(claimed.rid, f"The server can't read the stored request: {type(error).__name__}: {error}")


class DeadReplicas:
    """Detects, for one epoch, the other replicas of the model that are gone. It reads the locks of the replicas of its
    last look, once a second in one round trip."""

    def __init__(self, client: SyncRedis, lease: Lease) -> None:
        self._client = client
        self._model = lease.model
        self._replica = lease.replica
        self._names: list[str] = []
        self._absent_since: dict[str, float] = {}
        self._reported: dict[str, bool] = {}
        """The replicas that were returned since they last had a leader, and whether each had been given up."""
        self._looked = 0.0

    def gone(self) -> list[str]:
        """The replicas whose lock has been absent for REPLICA_GONE_S, or at all if their agent gave them up. Each is
        returned once while it is absent, and once more when it is given up. Raises RedisUnavailable."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return []
        if now - self._looked > 3 * LOOK_EVERY_S:
            self._absent_since.clear()  # Redis or this leader was away: a lock may have lapsed without a fault
        locks = [holder(self._model, name) for name in self._names]
        states = [status_of(self._model, name) for name in self._names]
        replicas, *answers = run_every(self._client, [catalog.replicas(self._model), *locks, *states])
        self._looked = time.monotonic()
        gone: list[str] = []
        for name, token, status in zip(self._names, answers[: len(locks)], answers[len(locks) :], strict=True):
            if token is not None:
                self._absent_since.pop(name, None)
                self._reported.pop(name, None)
                continue
            given_up = status is not None and status.state == "failed"
            late = now - self._absent_since.setdefault(name, now) >= REPLICA_GONE_S
            if (late or given_up) and (name not in self._reported or given_up > self._reported[name]):
                self._reported[name] = given_up
                gone.append(name)
        self._names = sorted(replicas.keys() - {self._replica})
        # A name is given again once its replica is retired: the next one of that name is another replica.
        for by_replica in (self._absent_since, self._reported):
            for name in by_replica.keys() - replicas.keys():
                del by_replica[name]
        return gone

    def look_again(self, name: str) -> None:
        """Return this replica once more: its requests could not be taken over yet."""
        self._reported.pop(name, None)


class BackgroundCall(Generic[T]):
    """A thread for calls, one at a time. It is a daemon: a call that never returns keeps no process alive. Two queues,
    because a future costs several times as much, and a leader sends a call with every short step."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        self._answers: SimpleQueue[T | Exception] = SimpleQueue()
        # A thread begins without its parent's context: model, rank and epoch belong on this one's lines too.
        Thread(target=copy_context().run, args=(self._run,), name=name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._answers.put(call())
            except Exception as error:  # raised where the answer is asked for
                self._answers.put(error)

    def send(self, call: Callable[[], T]) -> None:
        self._calls.put(call)

    def answer(self) -> T:
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, seconds: float) -> None:
        """Let the call under way end, `seconds` at most, and forget its answer."""
        with suppress(Empty):
            self._answers.get(timeout=seconds)

    def close(self) -> None:
        """The thread ends after the call under way."""
        self._calls.put(None)
