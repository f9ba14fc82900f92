"""Many connections of one key, from one process.

It must cost less than what it measures: prepared bytes, no HTTP library, and a low priority, because the other tenant's
client shares its cores.
"""

from __future__ import annotations

import itertools
import os
import resource
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import click
import msgspec

from ops.harness.exchange import Address, HttpConnection, chat, close_all, dial
from ops.harness.processes import until_terminated

SOURCE = "127.0.0.2" if sys.platform == "linux" else ""
"""The crowd's own address: Linux has all of 127.0.0.0/8."""
CUT_AFTER_S = 0.005
BURST_PAUSE_S = 0.5
"""Between the last answer of a burst and the next burst."""
BURST_TOKENS = 2
LOOP_TOKENS = 1
WAITING_TOKENS = 4
MOST_PENDING = 600
"""Streams that may wait for their response headers at a time; the others are sent later."""
WAIT_WITHIN_S = 60.0
"""After this time a crowd that is to wait sends no more, and the row says how many wait."""
AGAIN_S = 0.5
"""After a refusal, a stream that is to wait is sent again."""
TICK_S = 0.1


class Deeds(msgspec.Struct):
    """The report of a crowd. Times are those of the monotonic clock, which all processes of a host share."""

    sent: int = 0
    statuses: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Answers by their status; 0: the connection ended without one."""
    named: int = 0
    """Answers with status 422 that name a model of the attack."""
    cut_at: dict[int, float] = msgspec.field(default_factory=dict[int, float])
    """By the number of the request."""
    comment_bytes: int = 0
    """Of waiting streams, with the framing of their chunks, since all of them waited."""
    comments_s: float = 0.0
    """The seconds in which these came."""
    waiting: int = 0
    """Streams that still waited at the end."""
    bursts: int = 0
    processor_s: float = 0.0


class Crowd:
    """`connections` clients of one key, whose requests go to `models` by turns. Each method attacks until `stopped`."""

    def __init__(
        self,
        address: Address,
        key: str,
        models: Sequence[str],
        connections: int,
        first: int,
        stopped: Callable[[], bool],
    ) -> None:
        self._address = address
        self._key = key
        self._models = models
        self._connections = connections
        self._stopped = stopped
        self._numbers = itertools.count(first)
        self._selector = selectors.DefaultSelector()
        self._statuses = Counter[int]()
        self.deeds = Deeds()

    def cut(self) -> None:
        """Send streams, and close each connection `CUT_AFTER_S` later; what came until then is not read."""
        opened = deque[tuple[float, int, socket.socket]]()
        while not self._stopped():
            while opened and opened[0][0] <= time.monotonic():
                _, number, connection = opened.popleft()
                connection.close()
                self.deeds.cut_at[number] = time.monotonic()
            while len(opened) < self._connections:
                number = next(self._numbers)
                connection = dial(self._address, SOURCE)
                with suppress(BlockingIOError):  # the accept queue is full: it is cut before it has sent anything
                    connection.sendall(self._request(number, BURST_TOKENS, stream=True))
                    self.deeds.sent += 1
                opened.append((time.monotonic() + CUT_AFTER_S, number, connection))
            time.sleep(max(0.0, opened[0][0] - time.monotonic()))
        for _, _, connection in opened:
            connection.close()

    def burst(self) -> None:
        """Send a stream on every connection at once; when all are answered, again, on new connections."""
        while not self._stopped():
            clients = [HttpConnection(self._selector, self._address, SOURCE) for _ in range(self._connections)]
            for client in clients:
                self._send(client, BURST_TOKENS, stream=True)
            self.deeds.bursts += 1
            unanswered = sum(client.connected for client in clients)
            while unanswered and not self._stopped():
                for client in self._ready():
                    if client.proceed() is None or client.answer.whole:
                        self._note(client)
                        client.close()
                        unanswered -= 1
            close_all(self._selector)
            until = time.monotonic() + BURST_PAUSE_S
            while time.monotonic() < until and not self._stopped():
                time.sleep(TICK_S)

    def loop(self) -> None:
        """Send a small chat on every connection, and the next one as soon as it has an answer, whatever that is."""
        clients = [HttpConnection(self._selector, self._address, SOURCE) for _ in range(self._connections)]
        for client in clients:
            self._send(client, LOOP_TOKENS, stream=False)
        while not self._stopped():
            for client in self._ready():
                if client.proceed() is None or client.answer.whole:
                    self._note(client)
                    self._send(client, LOOP_TOKENS, stream=False)
        close_all(self._selector)

    def wait(self, begin: Callable[[], None]) -> None:
        """Have a stream wait on every connection; `begin` is called once each has its response headers."""
        clients = [HttpConnection(self._selector, self._address, SOURCE) for _ in range(self._connections)]
        due = deque((0.0, client) for client in clients)
        pending = set[HttpConnection]()
        waiting = set[HttpConnection]()
        began = 0.0
        until = time.monotonic() + WAIT_WITHIN_S
        while not self._stopped():
            if not began and time.monotonic() > until:
                due.clear()
            while due and due[0][0] <= time.monotonic() and len(pending) < MOST_PENDING:
                _, client = due.popleft()
                self._send(client, WAITING_TOKENS, stream=True)
                pending.add(client)
            for client in self._ready():
                piece = client.proceed()
                if client in waiting:
                    if piece is None or b"data: " in piece:
                        waiting.discard(client)
                    elif began:
                        self.deeds.comment_bytes += len(piece)
                elif client in pending and (client.answer.status or piece is None):
                    pending.discard(client)
                    self._note(client)
                    if client.answer.status == 200:
                        waiting.add(client)
                    else:
                        client.close()
                        due.append((time.monotonic() + AGAIN_S, client))
                if client.answer.whole:
                    client.close()
            if not began and not due and (not pending or time.monotonic() > until):
                began = time.monotonic()
                begin()
        self.deeds.comments_s = time.monotonic() - began if began else 0.0
        self.deeds.waiting = len(waiting)
        close_all(self._selector)

    def report(self) -> Deeds:
        self.deeds.statuses = dict(self._statuses)
        self.deeds.processor_s = time.process_time()
        return self.deeds

    def _request(self, number: int, tokens: int, *, stream: bool) -> bytes:
        model = self._models[number % len(self._models)]
        return chat(self._address, model, number, tokens, stream=stream, key=self._key)

    def _send(self, client: HttpConnection, tokens: int, *, stream: bool) -> None:
        client.send(self._request(next(self._numbers), tokens, stream=stream))
        self.deeds.sent += 1

    def _note(self, client: HttpConnection) -> None:
        self._statuses[client.answer.status] += 1
        if client.answer.status == 422:
            self.deeds.named += any(f"'{model}'".encode() in client.answer.data for model in self._models)

    def _ready(self) -> list[HttpConnection]:
        return [key.data for key, _ in self._selector.select(TICK_S)]


def attack(address: Address, key: str, models: list[str], kind: str, connections: int, first: int) -> Deeds:
    """Say `ready`, begin at SIGUSR1, and attack until SIGTERM. `first` is the number of the first request."""
    os.nice(10)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    crowd = Crowd(address, key, models, connections, first, until_terminated())
    click.echo("ready")
    signal.sigwait({signal.SIGUSR1})
    if kind == "wait":
        crowd.wait(lambda: click.echo("waiting"))
    else:
        {"cut": crowd.cut, "burst": crowd.burst, "loop": crowd.loop}[kind]()
    return crowd.report()
