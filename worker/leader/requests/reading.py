"""Requests that were claimed and are not here yet: their parameters and logs, read in pages beside the step loop."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import copy_context
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

import structlog
from redis import RedisError

from control.errors import FurrowError, RedisUnavailable
from control.messages import GenerationRequest, LogEntry
from control.redis.connection import Call
from control.replicas.lease import Lease
from control.requests import PAGE_ENTRIES, Claimed, read_log, read_params
from worker.leader.requests.redis_exchange import AWAY_S, RedisExchange
from worker.leader.requests.running import RunningRequest

log = structlog.get_logger()

AT_ONCE = 4 * PAGE_ENTRIES
"""Entries that the step loop reads itself, with the claim that brought them; longer logs are read beside it."""
BATCH = 32
"""Requests whose parameters and short logs are read in one round trip."""


@dataclass(frozen=True)
class Unreadable:
    """A claimed request whose parameters or log can't be decoded, and why."""

    rid: str
    cause: str


Read = tuple[Claimed, RunningRequest | Unreadable | None]


class Reading:
    """The reads of one epoch: `add` claimed requests, and `take` those that are ready. Nothing else is shared with the
    thread.

    Only its owner appends to a log, so a log read page by page is whole. A request that was taken away meanwhile is
    refused at its first emission.
    """

    def __init__(self, lease: Lease, exchange: RedisExchange) -> None:
        self._model, self._exchange = lease.model, exchange
        self._claimed: dict[str, Claimed] = {}
        self._ready: list[Read] = []
        self._wanted: SimpleQueue[Claimed | None] = SimpleQueue()
        self._read: SimpleQueue[Read | Exception] = SimpleQueue()
        self._closed = Event()
        self._thread: Thread | None = None

    def __contains__(self, rid: str) -> bool:
        return rid in self._claimed

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
        entries, at_once = 0, list[Claimed]()
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
            return self._exchange.hold(lambda: self._read_short(batch))
        except (FurrowError, RedisError):
            raise
        except Exception as error:
            if len(batch) == 1:
                return [(batch[0], _unreadable(batch[0], error))]
            return [outcome for claimed in batch for outcome in self._read_batch([claimed])]

    def take(self) -> list[RunningRequest | Unreadable]:
        """The requests that have become ready since the last call, in order. One that is gone is forgotten here."""
        read, self._ready = self._ready, []
        while True:
            try:
                outcome = self._read.get_nowait()
            except Empty:
                break
            if isinstance(outcome, Exception):
                raise outcome
            read.append(outcome)
        found: list[RunningRequest | Unreadable] = []
        for claimed, request in read:
            if self._claimed.get(claimed.rid) is not claimed:  # let go of meanwhile
                continue
            del self._claimed[claimed.rid]
            if request is not None:
                found.append(request)
            else:
                log.info("a claimed request is gone", rid=claimed.rid, action="read_request")
        return found

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
                return self._exchange.try_every(calls)
            except RedisUnavailable:
                if self._closed.wait(AWAY_S):
                    raise

    def _read_short(self, some: list[Claimed]) -> list[Read]:
        params = [read_params(self._model, claimed.rid) for claimed in some]
        logged = [claimed for claimed in some if claimed.seq]
        logs = [read_log(self._model, claimed.rid, 0) for claimed in logged]
        answers = self._exchange.try_every([*params, *logs])
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
