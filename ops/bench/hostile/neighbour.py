"""Another tenant beside an attack, and a prober of /health, in one process.

Both send at fixed moments, whether or not what they sent before was answered, and count from these moments: a delay of
this process itself is in each figure, and is shown beside it (`late_ms`).
"""

from __future__ import annotations

import heapq
import itertools
import re
import selectors
import time
from collections.abc import Callable

import click
import msgspec

from ops.harness.exchange import Address, HttpConnection, chat, close_all, get

CHAT_EVERY_S = 0.13
"""No multiple of a leader's step, so that all moments of a step are met."""
HEALTH_EVERY_S = 0.05
TOKENS = 4
GIVE_UP_S = 30.0
"""The wait for answers when nothing more is sent.

An answer that is missing then has failed, and counts as having taken at least so long.
"""
_TOKEN = re.compile(rb"\nid: [^:\n]*:[1-9]\d*\.")


class NeighbourReport(msgspec.Struct):
    """Milliseconds from the moment at which a request was due."""

    fresh_ms: list[float] = msgspec.field(default_factory=list[float])
    """To the first token of a stream on a new connection."""
    kept_ms: list[float] = msgspec.field(default_factory=list[float])
    """To the first token of a stream on a connection that was kept alive."""
    health_ms: list[float] = msgspec.field(default_factory=list[float])
    """To the whole answer of /health, on new and kept connections by turns."""
    gaps_ms: list[float] = msgspec.field(default_factory=list[float])
    """Between two tokens of a stream, as they came here; a leader's step takes 50."""
    late_ms: list[float] = msgspec.field(default_factory=list[float])
    """To the sending of a request."""
    failed: list[str] = msgspec.field(default_factory=list[str])
    """Of streams and of /health: what came instead of a whole answer."""

    @property
    def first_ms(self) -> list[float]:
        return self.fresh_ms + self.kept_ms


class Request:
    """One that is under way on `connection`."""

    def __init__(self, connection: HttpConnection, due: float, times: list[float], *, stream: bool, keep: bool) -> None:
        self.connection = connection
        self.due = due
        self.times = times
        self.stream = stream
        self.keep = keep
        self.answered = False
        self._tokens = 0
        self._token_at = 0.0

    def look(self, gaps: list[float]) -> None:
        """Time the first token and the gaps between tokens, or the whole answer where it is no stream."""
        answer = self.connection.answer
        now = time.monotonic()
        tokens = len(_TOKEN.findall(answer.data)) if self.stream else 0
        answered = tokens or (answer.whole and not self.stream)
        if answered and answer.status == 200 and not self.answered:
            self.answered = True
            self.times.append(1000 * (now - self.due))
        if tokens > self._tokens:
            if self._tokens:
                gaps.append(1000 * (now - self._token_at))
            self._tokens = tokens
            self._token_at = now

    def give_up(self, gaps: list[float]) -> None:
        """Count the missing answer or token with the time that it has taken until now."""
        now = time.monotonic()
        if not self.answered:
            self.times.append(1000 * (now - self.due))
        elif self.stream:
            gaps.append(1000 * (now - self._token_at))


class Neighbour:
    """Sends chats and probes for `seconds`, every other one of them on a connection that was used before."""

    def __init__(self, address: Address, key: str, model: str, first: int) -> None:
        self._address = address
        self._key = key
        self._model = model
        self._numbers = itertools.count(first)
        self._selector = selectors.DefaultSelector()
        self._under_way: dict[HttpConnection, Request] = {}
        self._idle: dict[bool, list[HttpConnection]] = {True: [], False: []}
        """Connections that were kept alive, of streams (True) and of probes."""
        self.report = NeighbourReport()

    def run(self, seconds: float, sent: Callable[[], None]) -> None:
        """`sent` is called when the time is over; then answers are only waited for."""
        began = time.monotonic()
        end = began + seconds
        due = [(began, True, True), (began, False, True)]
        over = False
        while (now := time.monotonic()) < end or (self._under_way and now < end + GIVE_UP_S):
            if now >= end and not over:
                over = True
                sent()
            while due and due[0][0] <= time.monotonic():
                moment, stream, keep = heapq.heappop(due)
                self._begin(moment, stream=stream, keep=keep)
                following = moment + (CHAT_EVERY_S if stream else HEALTH_EVERY_S)
                if following < end:
                    heapq.heappush(due, (following, stream, not keep))
            pause = max(0.0, due[0][0] - time.monotonic()) if due else 0.1
            for key, _ in self._selector.select(pause):
                self._proceed(key.data)
        if not over:
            sent()
        for request in self._under_way.values():
            request.give_up(self.report.gaps_ms)
            self._fail(request)
        close_all(self._selector)

    def _begin(self, due: float, *, stream: bool, keep: bool) -> None:
        idle = self._idle[stream]
        reused = keep and bool(idle)
        connection = idle.pop() if reused else HttpConnection(self._selector, self._address)
        if not stream:
            request = get(self._address, "/health")
            times = self.report.health_ms
        else:
            number = next(self._numbers)
            request = chat(self._address, self._model, number, TOKENS, stream=True, key=self._key)
            times = self.report.kept_ms if reused else self.report.fresh_ms
        self._under_way[connection] = Request(connection, due, times, stream=stream, keep=keep)
        self.report.late_ms.append(1000 * (time.monotonic() - due))
        connection.send(request)
        if not connection.connected:
            self._fail(self._under_way.pop(connection))

    def _proceed(self, connection: HttpConnection) -> None:
        piece = connection.proceed()
        if connection not in self._under_way:
            return  # an idle connection that the server has closed
        request = self._under_way[connection]
        request.look(self.report.gaps_ms)
        if piece is not None and not connection.answer.whole:
            return
        del self._under_way[connection]
        if not request.answered or not connection.answer.whole:
            self._fail(request)
        elif request.keep:
            self._idle[request.stream].append(connection)
            return
        connection.close()

    def _fail(self, request: Request) -> None:
        kind = "stream" if request.stream else "/health"
        waited = time.monotonic() - request.due
        text = bytes(request.connection.answer.data[-200:]).decode("latin-1")
        self.report.failed.append(f"{kind} after {waited:.1f} s: {text or 'no answer'}")


def ask_and_probe(address: Address, key: str, model: str, first: int, seconds: float) -> NeighbourReport:
    """Say `begin`, and `sent` when the time is over; its report, once all is answered."""
    neighbour = Neighbour(address, key, model, first)
    click.echo("begin")
    neighbour.run(seconds, lambda: click.echo("sent"))
    return neighbour.report
