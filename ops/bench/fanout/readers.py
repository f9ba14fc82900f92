"""Many clients of streams in one process, on raw bytes.

It must cost far less than what it measures: one `recv` and one search per arrival, no HTTP library, no event loop but
epoll.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ops.bench.fanout.leaders import MODEL, TOKENS, TOOL, Ring, StreamLoad
from ops.harness.exchange import Address, RawAnswer, chat
from ops.harness.program import Summary, summarise

_PLACE = re.compile(rb"id: [^:\n]*:(\d+)\.")
_OK = b"HTTP/1.1 200"
_RECEIVE = 1 << 17
_MOST_WAITING = 32
"""Clients that may wait for their first token at a time, so that they do not all connect at one moment."""
_BUCKET_MS = 0.05
_BUCKETS = 200_000
_PATIENCE_S = 60.0
WARM_UP = 30
"""Whole answers that are not timed."""


class Arrivals:
    """Counts of a measured time. `latency` has a bucket for each 0.05 ms, the last for all longer delays."""

    def __init__(self) -> None:
        self.tokens = self.reads = self.bytes = self.answers = 0
        self.latency = [0] * _BUCKETS

    def summary(self, seconds: float) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens / seconds,
            "tokens_per_read": self.tokens / max(1, self.reads),
            "bytes_per_token": self.bytes / max(1, self.tokens),
            "answers": self.answers,
            "p50_ms": self._percentile(50),
            "p99_ms": self._percentile(99),
            "p999_ms": self._percentile(99.9),
            "max_ms": self._percentile(100),
        }

    def _percentile(self, share: float) -> float:
        """Upper end of the bucket in which it lies."""
        timed = sum(self.latency)
        below = 0
        for bucket, count in enumerate(self.latency):
            below += count
            if count and below >= share / 100 * timed:
                return (bucket + 1) * _BUCKET_MS
        return float("nan")


class Reader:
    """One client: asks, reads to the end of the answer, asks again on the same connection."""

    def __init__(self, number: int, address: Address, load: StreamLoad, ring: Ring) -> None:
        self._number = number
        self._load = load
        self._times = ring.times
        self._first = number * TOKENS
        self._address = address
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.seq = 0
        self._rest = b""
        self._done = False
        self._length = load.first_answer(number)

    def ask(self) -> None:
        fields: dict[str, Any] = {"tools": [TOOL]} if self._load.calls else {}
        self.socket.sendall(chat(self._address, MODEL, self._number, self._length, stream=True, **fields))

    def read(self, arrivals: Arrivals) -> None:
        """Take what is there. Raises ConnectionError for anything but a whole answer in order."""
        data = self.socket.recv(_RECEIVE)
        now = time.monotonic()
        if not data:
            raise ConnectionError(f"client {self._number}: the connection was closed after token {self.seq}")
        arrivals.reads += 1
        arrivals.bytes += len(data)
        if self._rest:
            data = self._rest + data
        places = _PLACE.findall(data)
        if places:
            self._reach(int(places[-1]), now, arrivals)
        elif not self.seq and len(data) >= len(_OK) and data.startswith(_OK[:9]) and not data.startswith(_OK):
            raise ConnectionError(f"client {self._number}: {data[:400].decode('latin-1')}")
        # Cut anywhere but behind an event: what follows the last one is searched with what comes next.
        self._rest = b"" if data.endswith(b"\n\n\r\n") else data[max(0, data.rfind(b"\n\n")) :]
        self._done |= b"data: [DONE]" in data
        if data.endswith(b"0\r\n\r\n"):
            self._end(data, arrivals)

    def _reach(self, seq: int, now: float, arrivals: Arrivals) -> None:
        if seq < self.seq:
            raise ConnectionError(f"client {self._number}: token {seq} came after {self.seq}")
        times = self._times
        first = self._first
        latency = arrivals.latency
        for token in range(max(self.seq + 1, seq - TOKENS + 1), seq + 1):
            late_ms = 1000 * (now - times[first + token % TOKENS])
            latency[min(_BUCKETS - 1, int(late_ms / _BUCKET_MS))] += 1
        arrivals.tokens += seq - self.seq
        self.seq = seq

    def _end(self, data: bytes, arrivals: Arrivals) -> None:
        if not self._done or self.seq != self._length:
            raise ConnectionError(
                f"client {self._number}: ended at token {self.seq} of {self._length}: {data[-300:]!r}"
            )
        arrivals.answers += 1
        self.seq = 0
        self._rest = b""
        self._done = False
        self._length = self._load.tokens
        self.ask()


def serve_all(reader: Callable[[int], Reader], clients: int, seconds: float) -> dict[str, Any]:
    """Start every client, wait until each has its first token, then count for so many seconds. A client connects when
    it asks: a connection that says nothing for long is closed."""
    selector = selectors.DefaultSelector()
    unstarted = list(range(clients))
    quiet = time.monotonic() + _PATIENCE_S
    arrivals = Arrivals()
    until = float("inf")
    waiting = set[Reader]()
    while (now := time.monotonic()) < until:
        while unstarted and len(waiting) < _MOST_WAITING:
            client = reader(unstarted.pop())
            waiting.add(client)
            selector.register(client.socket, selectors.EVENT_READ, client)
            client.ask()
        for key, _ in selector.select(timeout=1.0):
            key.data.read(arrivals)
            if waiting and key.data.seq:
                waiting.discard(key.data)
        if until == float("inf"):
            if not waiting and not unstarted:
                print("begin", flush=True)
                arrivals = Arrivals()
                until = time.monotonic() + seconds
            elif now > quiet:
                raise ConnectionError(f"{len(waiting)} clients got no token")
    return arrivals.summary(seconds)


# --- whole answers ----------------------------------------------------------------------------------------------------


def overhead_ms(address: Address, ring_path: Path, requests: int, tokens: int) -> Summary:
    """Milliseconds from the request's first byte to the answer's last, less those in which a leader had it."""
    ring = Ring(ring_path, 1)
    times = list[float]()
    request = chat(address, MODEL, 0, tokens, stream=False)
    with socket.create_connection(address, timeout=30) as connection:
        for turn in range(WARM_UP + requests):
            began = time.monotonic()
            connection.sendall(request)
            answer = _read(connection)
            ended = time.monotonic()
            if answer.status != 200:
                raise RuntimeError(f"no answer: {bytes(answer.data[:300])!r}")
            if json.loads(answer.body)["usage"]["completion_tokens"] != tokens:
                raise RuntimeError(f"an answer that is not whole: {bytes(answer.data[:300])!r}")
            if turn >= WARM_UP:
                times.append(1000 * (ended - began - ring.times[0]))
    return summarise(times)


def _read(connection: socket.socket) -> RawAnswer:
    """One answer, whose head is looked through for its length alone: else the client would be measured."""
    answer = RawAnswer()
    while not answer.whole:
        piece = connection.recv(65536)
        if not piece:
            raise RuntimeError("the server closed the connection")
        answer.feed(piece)
    return answer


# --- the process ------------------------------------------------------------------------------------------------------


def read(address: Address, ring: Path, load: StreamLoad, seconds: float) -> dict[str, Any]:
    """Say `begin` when every client is served; what they saw in so many seconds after that."""
    times = Ring(ring, load.clients)
    return serve_all(lambda number: Reader(number, address, load, times), load.clients, seconds)
