"""The row `attacks` of `furrow bench hostile`: polite streams with and without HTTP attacks beside them.

An attack returns how many of its attempts it made, and how many the server refused in the expected way. One that was
not refused, or that did nothing, counts against the server.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import click

from control import access
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from ops.bench.fanout.fanout import api, wait_for_end, wait_for_model
from ops.bench.fanout.leaders import StreamLoad, lead
from ops.bench.fanout.readers import read
from ops.common.waiting import NotInTime, until
from ops.harness.client import CHAT, COMPLETIONS
from ops.harness.exchange import Address
from ops.harness.farm import private_redis, say
from ops.harness.processes import MIB, calling, looking, resident
from ops.harness.program import Figure
from ops.local.ready import get

LATER_MS = 100.0
"""At p99.9, above an undisturbed run."""
GROWTH_MIB = 64.0
HEADER_TIMEOUT_S = 2.0
"""Of the API process, so that slow attempts end several times in a run."""
RATE = 20.0
REPLICAS = 4
TOKENS = 1000
LOOK_EVERY_S = 0.1
_TIMEOUT_S = 30.0
_PIECE = 65_536
_HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "stream 0"}], "max_tokens": 4}
_UPLOADS = 8
_SLOW = 100
_CANCELLED = 50

Tried = tuple[int, int]
"""Attempts, and those that were refused as expected."""


@dataclass(frozen=True, slots=True)
class ApiTarget:
    """The API process under attack. `key` is one of the farm's, `spare` a client number that no polite stream has."""

    address: Address
    key: str
    spare: int

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=_TIMEOUT_S)

    def head(self, path: str, *lines: str) -> bytes:
        """Of a POST, without its end."""
        host, port = self.address
        return "".join(f"{line}\r\n" for line in (f"POST {path} HTTP/1.1", f"host: {host}:{port}", *lines)).encode()

    def post(self, path: str, body: bytes | dict[str, Any], *lines: str) -> int:
        """The status of a request's answer; 0 for none."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(self.head(path, f"content-length: {len(content)}", *lines) + b"\r\n" + content)

    def send(self, data: bytes) -> int:
        """The status of the answer to these bytes; 0 for none."""
        with self.connect() as connection:
            send(connection, data)
            return status(connection)

    @property
    def followed(self) -> int:
        """Requests that the API process follows."""
        metrics = get(self.address, "/metrics")[1].partition(b"\nfurrow_api_followed_requests ")[2]
        return int(float(metrics.partition(b"\n")[0] or 0))


def send(connection: socket.socket, data: bytes) -> None:
    """As much as the server takes."""
    with suppress(OSError):
        for start in range(0, len(data), _PIECE):
            connection.sendall(data[start : start + _PIECE])


def status(connection: socket.socket) -> int:
    """The status of the answer; 0 where the connection ended without one."""
    answer = b""
    with suppress(OSError):
        while len(answer) < 12 and (data := connection.recv(_PIECE)):
            answer += data
    return int(answer[9:12]) if answer.startswith(b"HTTP/1.1 ") else 0


# --- attacks ----------------------------------------------------------------------------------------------------------

Attack = Callable[[ApiTarget], Tried]


def _post(
    path: str, body: bytes | dict[str, Any], *statuses: int, times: int = 1, lines: tuple[str, ...] = ()
) -> Attack:
    return lambda target: (times, sum(target.post(path, body, *lines) in statuses for _ in range(times)))


def _bytes(make: Callable[[ApiTarget], bytes], expected: int) -> Attack:
    return lambda target: (1, int(target.send(make(target)) == expected))


def _opened(count: int, data: Callable[[ApiTarget], bytes], *statuses: int) -> Attack:
    """So many connections at once, which begin and never end."""

    def attack(target: ApiTarget) -> Tried:
        with ExitStack() as stack:
            connections = [stack.enter_context(target.connect()) for _ in range(count)]
            for connection in connections:
                send(connection, data(target))
            return count, sum(status(connection) in statuses for connection in connections)

    return attack


def _stalled(target: ApiTarget, *lines: str) -> bytes:
    """A body that comes nearly whole: refused when it is too slow, or when it gives way."""
    return target.head(CHAT, f"content-length: {4 * MIB}", *lines) + b"\r\n" + b" " * (4 * MIB - 100)


def _pipelined(target: ApiTarget) -> Tried:
    """A hundred thousand requests in one piece: a few are answered, and the connection ends."""
    answers = b""
    with target.connect() as connection, suppress(OSError):
        send(connection, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100_000)
        while data := connection.recv(_PIECE):
            answers += data
    return 1, int(0 < answers.count(b"HTTP/1.1 200") <= 100)


def _cancelled(target: ApiTarget) -> Tried:
    """Streams whose client leaves as soon as they were asked for: none of them is followed any more."""
    before = target.followed
    message = {"role": "user", "content": f"stream {target.spare}"}
    body = json.dumps({"model": "scripted", "messages": [message], "max_tokens": 1000, "stream": True}).encode()
    try:
        with ExitStack() as stack:
            for _ in range(_CANCELLED):
                head = target.head(CHAT, f"content-length: {len(body)}")
                send(stack.enter_context(target.connect()), head + b"\r\n" + body)
            until(lambda: target.followed > before, "the streams are followed")
        until(lambda: target.followed <= before, "the streams are cancelled")
    except NotInTime:
        return _CANCELLED, 0
    return _CANCELLED, _CANCELLED


_ARRAYS = b'{"prompt":[' + b"[1]," * (3 * MIB // 4) + b"[1]]}"
_TEXT = b'{"prompt":"' + b"a b " * (5 * MIB // 4) + b'"}'
"""More than the context, which is seen in pieces."""
_FOREIGN = ("origin: https://evil.example", "content-type: text/plain")
_OTHER_HOST = f"POST {CHAT} HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0\r\n\r\n".encode()

QUICK: dict[str, Attack] = {
    "many headers": _bytes(lambda target: target.head(CHAT) + b"a: b\r\n" * (20 * MIB), 431),
    "one header": _bytes(lambda target: target.head(CHAT) + b"x: " + b"a" * (100 * MIB), 431),
    "nested arrays": _post(COMPLETIONS, b'{"prompt":[' + b"[1]," * (62 * MIB // 4) + b"[1]]}", 413),
    # Refused by what is in them, or because smaller bodies need the memory.
    "nested arrays within the limit": _post(COMPLETIONS, _ARRAYS, 400, 429),
    "texts at the limit": _post(COMPLETIONS, _TEXT, 400, 429),
    "endless timeouts": _post(CHAT, {**_HELLO, "timeout": 1e17, "on_disconnect": "continue"}, 400, times=10),
    "huge n": _post(CHAT, {**_HELLO, "n": 10**9}, 400, times=10),
    "foreign origins": _post(CHAT, _HELLO, 403, times=20, lines=_FOREIGN),
    "foreign hosts": _bytes(lambda _: _OTHER_HOST, 403),
    "pipelined": _pipelined,
    "cancelled": _cancelled,
}
SLOW: dict[str, Attack] = {
    "slow headers": _opened(_SLOW, lambda target: target.head(CHAT), 408),
    "stalled uploads": _opened(_UPLOADS, _stalled, 408, 429),
    "stalled uploads with a key": _opened(
        _UPLOADS, lambda target: _stalled(target, f"authorization: Bearer {target.key}"), 408, 429
    ),
}
"""These hold their connections until the server ends them, beside the quick ones."""


def attack_all(address: Address, key: str, spare: int, seconds: float) -> dict[str, Tried]:
    """Every attack in turn, again and again, for so many seconds."""
    os.nice(10)  # the polite clients share its cores: it must not be what they wait for
    target = ApiTarget(address, key, spare)
    end = time.monotonic() + seconds
    with ThreadPoolExecutor() as pool:
        slow = [pool.submit(_repeated, target, {name: attack}, end) for name, attack in SLOW.items()]
        tried = _repeated(target, QUICK, end)
        for future in slow:
            tried |= future.result()
    return tried


def _repeated(target: ApiTarget, attacks: dict[str, Attack], end: float) -> dict[str, Tried]:
    """Each at least once, then again until the time is over."""
    attempts = Counter[str]()
    refused = Counter[str]()
    for turn in range(1_000_000):
        for name, attack in attacks.items():
            if turn and time.monotonic() >= end:
                return {name: (attempts[name], refused[name]) for name in attempts}
            count, as_expected = attack(target)
            attempts[name] += count
            refused[name] += as_expected
    raise AssertionError("the time never ended")


# --- the row ----------------------------------------------------------------------------------------------------------


def measure(own: set[int], others: set[int], clients: int, seconds: float, runs: int) -> list[Figure]:
    """So many pairs of runs of the polite streams, with and without attacks."""
    polite = StreamLoad(clients, REPLICAS, RATE, TOKENS)
    served = StreamLoad(clients + 1, REPLICAS, RATE, TOKENS)  # with the attackers' client, whose number comes last
    calm = list[float]()
    disturbed = list[float]()
    memory = list[float]()
    tried = list[dict[str, Tried]]()
    with (
        private_redis() as (folder, url),
        api(own, url, "--header-timeout", str(HEADER_TIMEOUT_S)) as (part, address),
        calling(others, lead, ring=(ring := folder / "ring"), redis_url=url, load=served),
    ):

        def lateness() -> float:
            """Milliseconds at p99.9 from emit to the client's socket."""
            with calling(others, read, address=address, ring=ring, load=polite, seconds=seconds) as readers:
                readers.await_line("begin")
                arrivals = readers.result(dict[str, float])
            wait_for_end(address)
            return arrivals["p999_ms"]

        wait_for_model(address)
        with connect(url) as client:
            key = new_key(client)
        for turn in range(1, runs + 1):
            say(f"run {turn} of {runs}: {clients} streams for {seconds:g} s, then again with attacks")
            calm.append(lateness())
            settled = resident(part.pid)
            with (
                looking(lambda settled=settled: memory.append(resident(part.pid) - settled), LOOK_EVERY_S),
                calling(others, attack_all, address=address, key=key, spare=clients, seconds=seconds) as attackers,
            ):
                disturbed.append(lateness())
                tried.append(attackers.result(dict[str, Tried]))
    for before, after in zip(calm, disturbed, strict=True):
        click.echo(f"p99.9 from emit to socket: undisturbed {before:.1f} ms, attacked {after:.1f} ms")
    return figures(calm, disturbed, memory, tried)


def figures(
    calm: list[float], disturbed: list[float], memory: list[float], tried: list[dict[str, Tried]]
) -> list[Figure]:
    """The figures with limits; `memory` is the growth at each sample, in MiB."""
    judged = [
        Figure("p99.9 of tokens, above an undisturbed run", median(disturbed) - median(calm), LATER_MS, "ms"),
        Figure("growth of the API's memory", max(memory), GROWTH_MIB, "MiB"),
    ]
    for name in (*QUICK, *SLOW):
        attempts, refused = (sum(run.get(name, (0, 0))[side] for run in tried) for side in (0, 1))
        judged.append(Figure(f"{name}: refused of {attempts}", refused, max(1, attempts), at_least=True))
    return judged


def new_key(client: SyncRedis, tenant: str = "") -> str:
    """The secret of a new API key."""
    key, secret = access.mint(name=tenant, tenant=tenant)
    access.create(client, key)
    return secret
