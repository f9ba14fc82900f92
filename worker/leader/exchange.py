"""A leader's way to Redis, in both directions: claims, logs and images come in, the emissions of steps go out.

`Exchange` knows no running request. It returns what Redis answered, and the step loop applies it.

The round trip of an emission may run on a thread of its own while the next step is computed. There is at most one, and
its answer is taken before the next one starts, so the leader is at most one step ahead of Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any, TypeVar

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
from worker.leader.background_call import BackgroundCall
from worker.leader.request import RunningRequest
from worker.leader.running_requests import Capacity
from worker.scheduling.plan import NeededImage

log = structlog.get_logger()

LOOP = "leader"
"""Name of this loop in log lines about an outage of Redis."""
AWAY_S = 0.2
"""Pause between attempts while Redis is away and a finished step is held."""
LEAVE_S = 1.0
"""Time for the call under way to finish at the end of an epoch."""
GATHER_S = 0.008
"""Where steps are shorter, Redis gets the tokens of several together; first and last tokens don't wait for others."""
CHANNELS = 3
AT_ONCE = 4 * PAGE_ENTRIES
"""Entries that the step loop reads itself, with the claim that brought them; longer logs are read beside it."""
BATCH = 32
"""Requests whose parameters and short logs are read in one round trip."""

T = TypeVar("T")


class RedisCalls:
    """One epoch's calls. While Redis is away a call waits; `check` ends the wait when the epoch is over. A lock
    that ran out meanwhile is taken again where nobody else had it."""

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
        """Run one call. Raises RedisUnavailable."""
        return run(self._client, call)

    def try_every(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run calls in one round trip, from any thread. Raises RedisUnavailable."""
        return run_every(self._client, calls)

    def held(self, call: Call[T]) -> T:
        """Run one call, when Redis is there."""
        return self.hold(lambda: run(self._client, call))

    def hold(self, attempt: Callable[[], T]) -> T:
        """Run `attempt` until Redis answers: a finished step is held, never thrown away, and nothing is poisoned."""
        while True:
            try:
                answer = attempt()
                outage.goes_on(LOOP)
                return answer
            except Lost as lost:  # nothing was done: a script asks for the lock first
                self._was_away = True
                self._check()
                self._take_again(lost)
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
                self._was_away = True
                self._check()
                time.sleep(AWAY_S)

    def _take_again(self, lost: Lost) -> None:
        """Take the lock that ran out again; the side thread may have done it already. Raises Lost or Fenced."""
        try:
            if run(self._client, renew(self._lease, self._world_size)):
                log.warning("the lock ran out and was taken again", reason=str(lost), action="renew")
        except RedisUnavailable as error:  # the attempt, made again, waits for it
            outage.waits(LOOP, error)

    def was_away(self) -> bool:
        """True if Redis was away since the last time that this was asked: what it has now may be older than before."""
        was_away = self._was_away
        self._was_away = False
        return was_away

    def wait_for_work(self, bell: str, block_ms: int) -> None:
        """Return once the bell rang after `bell`, for a request, a cancel or poison, or after `block_ms`."""
        try:
            wait_for_work(self._blocking, self._lease, bell, block_ms)
        except RedisUnavailable:
            time.sleep(AWAY_S)


@dataclass(frozen=True, slots=True)
class EmissionAnswer:
    """What Redis answered to the emissions of a step, and to the claim that went with them."""

    emissions: list[Emission]
    result: EmitResult
    claims: Claims | None


class Exchange:
    """One epoch's exchange with Redis. A context manager: at the end of the epoch a round trip under way gets LEAVE_S;
    the next epoch computes it again. Every method raises EpochOver when the epoch ends while it waits."""

    def __init__(self, lease: Lease, calls: RedisCalls, dead_replicas: DeadReplicas) -> None:
        self._lease = lease
        self._calls = calls
        self._dead_replicas = dead_replicas
        self._background: BackgroundCall[EmissionAnswer] = BackgroundCall("exchange")
        self._under_way: Callable[[], EmissionAnswer] | None = None
        self._emitted_at = 0.0
        self._bell = "0"
        """The id of the last wake-up that a claim has answered."""
        self._skip = 0
        self.reading = Reading(lease, calls)
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
        self.reading.close()
        if self._under_way is not None:
            self._under_way = None
            self._background.wait(LEAVE_S)
        self._background.close()

    def was_away(self) -> bool:
        """As `RedisCalls.was_away`."""
        return self._calls.was_away()

    # --- emissions out ----------------------------------------------------------------------------------------------

    @property
    def gathered(self) -> bool:
        """True if tokens have been gathered for long enough since the last emission."""
        return time.monotonic() - self._emitted_at >= self.gather_s

    def start(self, emissions: list[Emission], claim: Call[Claims] | None) -> None:
        """Emit, and run `claim` in the same round trip; `finish` brings the answer."""
        self._under_way = self._sending(emissions, claim)
        self._background.send(self._under_way)

    def finish(self) -> EmissionAnswer | None:
        """Wait for what `start` began; None where nothing is under way."""
        if self._under_way is None:
            return None
        again = self._under_way
        self._under_way = None
        attempts = iter([self._background.answer])  # and, where Redis was away, from here
        return self._note(self._calls.hold(lambda: next(attempts, again)()))

    def deliver(self, emissions: list[Emission], claim: Call[Claims] | None) -> EmissionAnswer:
        """As `start` and `finish`."""
        return self._note(self._calls.hold(self._sending(emissions, claim)))

    def emit_end(self, request: RunningRequest, state: RequestState) -> list[tuple[Emission, int]]:
        """Emit a request's end by itself, outside a step: the emissions, each with the time at which Redis took it, in
        ms of its clock."""
        taken: list[tuple[Emission, int]] = []
        done = False
        while not done:
            emission = request.emission(state)
            result = self._calls.held(requests.emit(self._lease, [emission]))
            expected = result.behind.get(request.rid)
            if expected is not None:
                request.send_again(emission, expected)
            else:
                request.emitted(emission)
                taken.append((emission, result.accepted_ms))
                done = emission.done is not None
        return taken

    def _sending(self, emissions: list[Emission], claim: Call[Claims] | None) -> Callable[[], EmissionAnswer]:
        """The round trip, to be made again after an outage: what was done already is recognised then."""
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
        claims = self._calls.held(self.claim(capacity))
        self._note_claims(claims)
        return claims

    def adopt(self) -> list[Claimed]:
        """All that Redis holds to be this replica's, in the order in which it was claimed first."""
        return self._in_batches(lambda after: requests.adopt(self._lease, after))

    def read(self, claims: Iterable[Claimed]) -> None:
        """Begin to read the parameters and logs of these requests."""
        self.reading.add(claims)

    def arrived(self) -> list[RunningRequest]:
        """The requests that have been read since the last call. One that can't be read becomes a dead letter."""
        arrived: list[RunningRequest] = []
        for request in self.reading.take():
            if isinstance(request, Unreadable):
                self._calls.held(requests.bury(self._lease, request.rid, request.cause))
            else:
                arrived.append(request)
        return arrived

    def wait_for_work(self, block_ms: int) -> None:
        """Return once there may be something to claim, to cancel or to end, or after `block_ms`."""
        self._calls.wait_for_work(self._bell, block_ms)

    def requeue(self, rid: str) -> None:
        """Put a request back into its queue at once; another epoch continues it from its log. Raises
        RedisUnavailable."""
        self._calls.try_once(requests.requeue(self._lease, rid))

    def _note_claims(self, claims: Claims) -> None:
        self._bell = claims.bell
        self._skip = claims.skip

    def _in_batches(self, call: Callable[[str], Call[Adopted]]) -> list[Claimed]:
        claims: list[Claimed] = []
        after = ""
        more = True
        while more:
            batch = self._calls.held(call(after))
            claims += batch.requests
            self._bell = batch.bell
            after = batch.after
            more = batch.more
        return sorted(claims, key=lambda one: (CLASSES.index(one.priority), one.claimed_ms, one.rid))

    # --- what other replicas left -----------------------------------------------------------------------------------

    def gone_replicas(self) -> list[str]:
        """As `DeadReplicas.gone`."""
        return self._calls.hold(self._dead_replicas.gone)

    def inherit(self, replica: str) -> Inheritance:
        """Take over the crash record of a replica that is gone."""
        return self._calls.held(requests.inherit(self._lease, replica))

    def take_over(self, replica: str) -> list[Claimed]:
        """All requests that a replica left behind which is gone."""
        return self._in_batches(lambda after: requests.takeover(self._lease, replica, after))

    def look_again(self, replica: str) -> None:
        """As `DeadReplicas.look_again`."""
        self._dead_replicas.look_again(replica)

    # --- images in --------------------------------------------------------------------------------------------------

    def read_pixels(self, images: Iterable[NeededImage]) -> dict[str, bytes]:
        """The pixels of these images by digest, rows of red, green and blue. One that is gone is left out."""
        pixels: dict[str, bytes] = {}
        for one in images:
            if one.image.digest not in pixels:
                data = self._read_pixels(one)
                if data is not None:
                    pixels[one.image.digest] = data
        return pixels

    def _read_pixels(self, one: NeededImage) -> bytes | None:
        size = one.image.height * one.image.width * CHANNELS
        pieces: list[bytes] = []
        for call in read_image(self._lease.model, one.rid, one.index, size):  # one by one: each answer is large
            piece = self._calls.held(call)
            if piece is None:
                return None
            pieces.append(piece)
        return b"".join(pieces)


@dataclass(frozen=True)
class Unreadable:
    """A claimed request whose parameters or log can't be decoded, and why."""

    rid: str
    cause: str


Read = tuple[Claimed, RunningRequest | Unreadable | None]


class Reading:
    """Requests that were claimed and can't run yet: their parameters and logs are read in pages beside the step loop.

    The reads of one epoch: `add` claimed requests, and `take` those that are ready. Nothing else is shared with the
    thread.

    Only its owner appends to a log, so a log read page by page is whole. A request that was taken away meanwhile is
    refused at its first emission.
    """

    def __init__(self, lease: Lease, calls: RedisCalls) -> None:
        self._model = lease.model
        self._calls = calls
        self._claimed: dict[str, Claimed] = {}
        self._ready: list[Read] = []
        self._wanted: SimpleQueue[Claimed | None] = SimpleQueue()
        self._read: SimpleQueue[Read | Exception] = SimpleQueue()
        self._closed = Event()
        self._thread: Thread | None = None

    def __bool__(self) -> bool:
        return bool(self._claimed)

    @property
    def rids(self) -> set[str]:
        """Requests that are the leader's and can't run yet."""
        return set(self._claimed)

    def has(self, claimed: Claimed) -> bool:
        """True if just this claim of the request is being read."""
        known = self._claimed.get(claimed.rid)
        return known is not None and known.attempts == claimed.attempts

    def add(self, claims: Iterable[Claimed]) -> None:
        """Begin to read. Short logs are ready when this returns; of the others the shortest comes first."""
        entries = 0
        at_once: list[Claimed] = []
        for claimed in sorted(claims, key=lambda claimed: claimed.seq):
            self._claimed[claimed.rid] = claimed
            entries += claimed.seq
            if claimed.seq < PAGE_ENTRIES and entries <= AT_ONCE:
                at_once.append(claimed)
            else:
                self._wanted.put(claimed)
                self._start()
        for start in range(0, len(at_once), BATCH):
            self._ready += self._read_batch(at_once[start : start + BATCH])

    def _read_batch(self, batch: list[Claimed]) -> list[Read]:
        """Requests with short logs. A request that can't be decoded spares the others."""
        try:
            return self._calls.hold(lambda: self._read_short(batch))
        except (FurrowError, RedisError):
            raise
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0], _unreadable(batch[0], error))]
            return [outcome for claimed in batch for outcome in self._read_batch([claimed])]

    def take(self) -> list[RunningRequest | Unreadable]:
        """The requests that have become ready since the last call, in order. One that is gone is forgotten here."""
        read = self._ready
        self._ready = []
        while True:
            try:
                outcome = self._read.get_nowait()
            except Empty:
                break
            if isinstance(outcome, Exception):
                raise outcome
            read.append(outcome)
        arrived: list[RunningRequest | Unreadable] = []
        for claimed, request in read:
            if self._claimed.get(claimed.rid) is not claimed:  # let go of meanwhile
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
        if self._ready or not self._claimed:
            return
        try:
            outcome = self._read.get(timeout=seconds)
        except Empty:
            return
        if isinstance(outcome, Exception):
            raise outcome
        self._ready.append(outcome)

    def close(self) -> None:
        """End the thread after the page under way."""
        self._closed.set()
        self._wanted.put(None)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=copy_context().run, args=(self._run,), name="reading", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (claimed := self._wanted.get()) is not None and not self._closed.is_set():
            try:
                self._read.put((claimed, self._read_long(claimed)))
            except (FurrowError, RedisError) as error:  # raised where the request is asked for
                self._read.put(error)
            except Exception as error:
                self._read.put((claimed, _unreadable(claimed, error)))

    def _read_long(self, claimed: Claimed) -> RunningRequest | None:
        began = time.monotonic()
        [params] = self._once([read_params(self._model, claimed.rid)])
        request = None if params is None else RunningRequest.begin(claimed, params)
        while request is not None and not self._closed.is_set():
            [page] = self._once([read_log(self._model, claimed.rid, request.accepted)])
            request.replay(page)
            if len(page) < PAGE_ENTRIES:
                break
        seconds = round(time.monotonic() - began, 3)
        log.info("read a token log", rid=claimed.rid, entries=claimed.seq, seconds=seconds, action="read_request")
        return request

    def _once(self, calls: list[Call[GenerationRequest | None]] | list[Call[list[LogEntry]]]) -> list[Any]:
        """The answers, when Redis is there."""
        while True:
            try:
                return self._calls.try_every(calls)
            except RedisUnavailable:
                if self._closed.wait(AWAY_S):
                    raise

    def _read_short(self, some: list[Claimed]) -> list[Read]:
        params = [read_params(self._model, claimed.rid) for claimed in some]
        logged = [claimed for claimed in some if claimed.seq]
        logs = [read_log(self._model, claimed.rid, 0) for claimed in logged]
        answers = self._calls.try_every([*params, *logs])
        pages = dict(zip([claimed.rid for claimed in logged], answers[len(some) :], strict=True))
        read: list[Read] = []
        for claimed, asked in zip(some, answers, strict=False):
            request = None if asked is None else RunningRequest.begin(claimed, asked)
            if request is not None:
                request.replay(pages.get(claimed.rid, []))
            read.append((claimed, request))
        return read


def _unreadable(claimed: Claimed, error: Exception) -> Unreadable:
    """Call it while `error` is handled: the log gets its traceback."""
    log.exception("a request can't be read", rid=claimed.rid, action="read_request")
    return Unreadable(claimed.rid, f"The server can't read the stored request: {type(error).__name__}: {error}")


LOOK_EVERY_S = 1.0


class DeadReplicas:
    """The detector of one epoch. It asks Redis once a second, in one round trip, for the replicas known at the last
    look."""

    def __init__(self, client: SyncRedis, lease: Lease) -> None:
        self._client, self._model, self._replica = client, lease.model, lease.replica
        self._names: list[str] = []
        self._absent: dict[str, float] = {}
        self._told: dict[str, bool] = {}
        """The replicas that were returned since they were last led, and whether each had been given up."""
        self._looked = 0.0

    def gone(self) -> list[str]:
        """The replicas whose lock has been absent for REPLICA_GONE_S, or at all if their agent gave them up. Each is
        returned once while it is absent, and once more when it is given up. Raises RedisUnavailable."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return []
        if now - self._looked > 3 * LOOK_EVERY_S:
            self._absent.clear()  # Redis was away, or this leader: nobody could renew, or nobody looked
        looks = [call for name in self._names for call in (holder(self._model, name), status_of(self._model, name))]
        known, *found = run_every(self._client, [catalog.replicas(self._model), *looks])
        self._looked = time.monotonic()
        gone = []
        for name, token, status in zip(self._names, found[::2], found[1::2], strict=True):
            if token is not None:
                self._absent.pop(name, None)
                self._told.pop(name, None)
                continue
            given_up = status is not None and status.state == "failed"
            late = now - self._absent.setdefault(name, now) >= REPLICA_GONE_S
            if (late or given_up) and (name not in self._told or given_up > self._told[name]):
                self._told[name] = given_up
                gone.append(name)
        self._names = sorted(known.keys() - {self._replica})
        for name in self._absent.keys() - known.keys():
            del self._absent[name]
        return gone

    def look_again(self, name: str) -> None:
        """Return this replica once more: its requests could not be taken over yet."""
        self._told.pop(name, None)
