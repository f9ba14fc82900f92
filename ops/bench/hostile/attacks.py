"""`python -m ops.bench.hostile.attacks`: every attack in turn, again and again, for so many seconds.

Each returns how many of its attempts it made and how many the server refused in the expected way. It prints both as
JSON. An attempt that was not refused, or that did nothing, counts against the server.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import click

from control.process import die_with_parent
from ops.bench.hostile.exchange import Target, everything, send, status
from ops.common.waiting import NotInTime, until
from ops.harness.client import CHAT, COMPLETIONS

MIB = 2**20
_HELLO = {"model": "scripted", "messages": [{"role": "user", "content": "stream 0"}], "max_tokens": 4}
_UPLOADS = 8
_SLOW = 100
_CANCELLED = 50

Tried = tuple[int, int]
"""Attempts, and those that were refused as expected."""


def _post(target: Target, path: str, body: bytes | dict[str, object], expected: int, times: int, *lines: str) -> Tried:
    return times, sum(target.post(path, body, *lines) == expected for _ in range(times))


def _post_large(target: Target, body: bytes) -> Tried:
    """Refused by what is in it, or because smaller bodies need the memory."""
    return 1, int(target.post(COMPLETIONS, body) in (400, 429))


def many_headers(target: Target) -> Tried:
    """120 MiB of small headers."""
    with target.connect() as connection:
        send(connection, target.head(CHAT) + b"a: b\r\n" * (20 * MIB))
        return 1, int(status(connection) == 431)


def one_header(target: Target) -> Tried:
    """One of 100 MiB."""
    with target.connect() as connection:
        send(connection, target.head(CHAT) + b"x: " + b"a" * (100 * MIB))
        return 1, int(status(connection) == 431)


def slow_headers(target: Target) -> Tried:
    """A head that begins and never ends."""
    with ExitStack() as stack:
        slow = [stack.enter_context(target.connect()) for _ in range(_SLOW)]
        for connection in slow:
            send(connection, target.head(CHAT))
        return _SLOW, sum(status(connection) == 408 for connection in slow)


def _stalled(target: Target, *lines: str) -> Tried:
    """Bodies that come nearly whole, and then nothing: refused when they are too slow, or when they give way."""
    with ExitStack() as stack:
        stalled = [stack.enter_context(target.connect()) for _ in range(_UPLOADS)]
        for connection in stalled:
            head = target.head(CHAT, f"content-length: {4 * MIB}", *lines)
            send(connection, head + b"\r\n" + b" " * (4 * MIB - 100))
        return _UPLOADS, sum(status(connection) in (408, 429) for connection in stalled)


def stalled_uploads(target: Target) -> Tried:
    return _stalled(target)


def stalled_uploads_with_a_key(target: Target) -> Tried:
    return _stalled(target, f"authorization: Bearer {target.key}")


def nested_arrays(target: Target) -> Tried:
    """62 MiB of them."""
    return _post(target, COMPLETIONS, b'{"prompt":[' + b"[1]," * (62 * MIB // 4) + b"[1]]}", 413, 1)


def nested_arrays_within_the_limit(target: Target) -> Tried:
    return _post_large(target, b'{"prompt":[' + b"[1]," * (3 * MIB // 4) + b"[1]]}")


def texts_at_the_limit(target: Target) -> Tried:
    """5 MiB of text are more than the context, which is found in pieces."""
    return _post_large(target, b'{"prompt":"' + b"a b " * (5 * MIB // 4) + b'"}')


def endless_timeouts(target: Target) -> Tried:
    return _post(target, CHAT, {**_HELLO, "timeout": 1e17, "on_disconnect": "continue"}, 400, 10)


def huge_n(target: Target) -> Tried:
    return _post(target, CHAT, {**_HELLO, "n": 10**9}, 400, 10)


def foreign_origins(target: Target) -> Tried:
    return _post(target, CHAT, dict(_HELLO), 403, 20, "origin: https://evil.example", "content-type: text/plain")


def foreign_hosts(target: Target) -> Tried:
    with target.connect() as connection:
        send(connection, f"POST {CHAT} HTTP/1.1\r\nhost: evil.example\r\ncontent-length: 0\r\n\r\n".encode())
        return 1, int(status(connection) == 403)


def pipelined(target: Target) -> Tried:
    """A hundred thousand requests in one piece: a few are answered, and the connection ends."""
    with target.connect() as connection:
        send(connection, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * 100_000)
        return 1, int(0 < everything(connection).count(b"HTTP/1.1 200") <= 100)


def cancelled(target: Target) -> Tried:
    """Streams whose client leaves as soon as they were asked for: none of them is followed any more."""
    before = _followed(target)
    message = {"role": "user", "content": f"stream {target.spare}"}
    body = json.dumps({"model": "scripted", "messages": [message], "max_tokens": 1000, "stream": True}).encode()
    try:
        with ExitStack() as stack:
            for _ in range(_CANCELLED):
                head = target.head(CHAT, f"content-length: {len(body)}")
                send(stack.enter_context(target.connect()), head + b"\r\n" + body)
            until(lambda: _followed(target) > before, "the streams are followed")
        until(lambda: _followed(target) <= before, "the streams are cancelled")
    except NotInTime:
        return _CANCELLED, 0
    return _CANCELLED, _CANCELLED


def _followed(target: Target) -> int:
    metrics = target.get("/metrics").partition(b"\nfurrow_api_followed_requests ")[2]
    return int(float(metrics.partition(b"\n")[0] or 0))


QUICK = (
    *(many_headers, one_header, nested_arrays, nested_arrays_within_the_limit, texts_at_the_limit, endless_timeouts),
    *(huge_n, foreign_origins, foreign_hosts, pipelined, cancelled),
)
SLOW = (slow_headers, stalled_uploads, stalled_uploads_with_a_key)
"""These hold their connections until the server ends them, beside the quick ones."""


def name_of(attack: Callable[[Target], Tried]) -> str:
    return attack.__name__.replace("_", " ")


def attack(target: Target, attacks: tuple[Callable[[Target], Tried], ...], end: float) -> dict[str, Tried]:
    """Each at least once, then again until the time is over."""
    tried = Counter[str]()
    refused = Counter[str]()
    for turn in range(1_000_000):
        for one in attacks:
            if turn and time.monotonic() >= end:
                return {name: (tried[name], refused[name]) for name in tried}
            made, worked = one(target)
            tried[name_of(one)] += made
            refused[name_of(one)] += worked
    raise AssertionError("the time never ended")


@click.command()
@click.option("--address", required=True, help="HOST:PORT")
@click.option("--key", required=True)
@click.option("--spare", required=True, type=int)
@click.option("--seconds", required=True, type=float)
def main(address: str, key: str, spare: int, seconds: float) -> None:
    die_with_parent()
    os.nice(10)  # the polite clients share its cores: it must not be what they wait for
    host, _, port = address.rpartition(":")
    target = Target(host, int(port), key, spare)
    end = time.monotonic() + seconds
    with ThreadPoolExecutor() as pool:
        slow = [pool.submit(attack, target, (one,), end) for one in SLOW]
        seen = attack(target, QUICK, end)
        for one in slow:
            seen |= one.result()
    click.echo(json.dumps(seen))


if __name__ == "__main__":
    main()
