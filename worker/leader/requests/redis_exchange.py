"""A leader's exchange with Redis: the tokens of a step go out, and requests come in, in one round trip.

The round trip may run on a thread of its own while the next step is computed. There is at most one, and its answer is
taken before the next one starts, so the leader is at most one step ahead of Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import structlog

from control import requests
from control.errors import Lost, RedisUnavailable
from control.messages import RequestState
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run, run_every
from control.redis.outage import outage
from control.replicas.commands import wait_for_work
from control.replicas.lease import Lease, renew
from control.requests import Claims, Emission, EmitResult
from worker.leader.requests.running import RunningRequest
from worker.tp_group.background_call import BackgroundCall

log = structlog.get_logger()

LOOP = "leader"
"""Name of this loop in log lines about an outage of Redis."""
AWAY_S = 0.2
"""Pause between attempts while Redis is away and a finished step is held."""
LEAVE_S = 1.0
"""Time for the call under way to finish at the end of an epoch."""

T = TypeVar("T")
Answer = tuple[EmitResult, Claims | None]


class RedisExchange:
    """One epoch's calls to Redis. While Redis is away every call waits; `check` ends the wait when the epoch is over.
    A lock that ran out meanwhile is taken again where nobody else had it.

    A context manager: at the end of the epoch a round trip under way gets LEAVE_S; the next epoch computes it again.
    """

    def __init__(
        self, client: SyncRedis, blocking: SyncRedis, lease: Lease, check: Callable[[], None], world_size: int = 1
    ) -> None:
        self._client, self._blocking, self._lease, self._check = client, blocking, lease, check
        self._world_size = world_size
        self._background: BackgroundCall[Answer] = BackgroundCall("exchange")
        self._under_way: Callable[[], Answer] | None = None
        self._was_away = False

    def __enter__(self) -> RedisExchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._under_way is not None:
            self._under_way = None
            self._background.wait(LEAVE_S)
        self._background.close()

    def deliver(self, rows: list[Emission], claim: Call[Claims] | None) -> Answer:
        """Emit the rows, and run `claim` with it where there is one. Raises EpochOver."""
        return self.hold(self._sending(rows, claim))

    def start(self, rows: list[Emission], claim: Call[Claims] | None) -> None:
        """As `deliver`, but does not wait: `finish` brings the outcome."""
        self._under_way = self._sending(rows, claim)
        self._background.send(self._under_way)

    def finish(self) -> Answer | None:
        """Wait for what `start` began, None where nothing is under way. Raises EpochOver."""
        if self._under_way is None:
            return None
        again, self._under_way = self._under_way, None
        attempts = iter([self._background.answer])  # and, where Redis was away, from here
        return self.hold(lambda: next(attempts, again)())

    def _sending(self, rows: list[Emission], claim: Call[Claims] | None) -> Callable[[], Answer]:
        """The round trip, to be made again after an outage: what was done already is recognised then."""
        calls: list[Call[Any]] = []

        def send() -> Answer:
            if not calls:
                calls.extend([*requests.emit_all(self._lease, rows), *([] if claim is None else [claim])])
            answers = run_every(self._client, calls)
            claims = None if claim is None else answers.pop()
            return requests.merged(answers), claims

        return send

    def emit_end(self, request: RunningRequest, state: RequestState = "finished") -> Iterator[tuple[Emission, int]]:
        """Emit a request's end by itself, outside a step's offer: each emission once Redis has taken it, and when it
        did in ms of its clock. Raises EpochOver."""
        done = False
        while not done:
            emission = request.emission(state)
            result = self.held(requests.emit(self._lease, [emission]))
            expected = result.behind.get(request.rid)
            if expected is not None:
                request.send_again(emission, expected)
            else:
                request.emitted(emission)
                yield emission, result.accepted_ms
                done = emission.done is not None

    def wait_for_work(self, bell: str, block_ms: int) -> None:
        """Return once the bell rang after `bell`, for a request, a cancel or poison, or after `block_ms`."""
        try:
            wait_for_work(self._blocking, self._lease, bell, block_ms)
        except RedisUnavailable:
            time.sleep(AWAY_S)

    def was_away(self) -> bool:
        """True if Redis was away since the last time that this was asked: what it has now may be older than before."""
        was_away, self._was_away = self._was_away, False
        return was_away

    def try_once(self, call: Call[T]) -> T:
        """Run one call. Raises RedisUnavailable."""
        return run(self._client, call)

    def try_every(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run calls in one round trip, from any thread. Raises RedisUnavailable."""
        return run_every(self._client, calls)

    def held(self, call: Call[T]) -> T:
        """Run one call, when Redis is there."""
        return self.hold(lambda: run(self._client, call))

    def _take_again(self, lost: Lost) -> None:
        """Take the lock that ran out again; the side thread may have done it already. Raises Lost or Fenced."""
        try:
            if run(self._client, renew(self._lease, self._world_size)):
                log.warning("the lock ran out and was taken again", reason=str(lost), action="renew")
        except RedisUnavailable as error:  # the attempt, made again, waits for it
            outage.waits(LOOP, error)

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
