"""The overhead of requests that are not streamed, one after the other on one connection, without the leader's time."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

from ops.bench.common.summary import Summary, summarise
from ops.bench.fanout.ring import Ring

WARM_UP = 30
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")


def overhead_ms(address: str, ring_path: Path, requests: int, tokens: int) -> Summary:
    """Milliseconds from the request's first byte to the answer's last, less those in which a leader had it."""
    ring, took = Ring(ring_path, 1), list[float]()
    message = [{"role": "user", "content": "answer 0"}]
    body = json.dumps({"model": "scripted", "messages": message, "max_tokens": tokens}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n"
    request = head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        for turn in range(WARM_UP + requests):
            began = time.monotonic()
            connection.sendall(request)
            answer = _read(connection)
            ended = time.monotonic()
            if json.loads(answer)["usage"]["completion_tokens"] != tokens:
                raise RuntimeError(f"an answer that is not whole: {answer[:300]!r}")
            if turn >= WARM_UP:
                took.append(1000 * (ended - began - ring.times[0]))
    return summarise(took)


def _read(connection: socket.socket) -> bytes:
    """The body of one answer, whose head is looked through for its length alone: else the client would be measured."""
    got = b""
    while (end := got.find(b"\r\n\r\n")) < 0:
        got += _more(connection)
    head, body = got[:end].lower(), got[end + 4 :]
    length = _LENGTH.search(head)
    if not head.startswith(b"http/1.1 200 ") or length is None:
        raise RuntimeError(f"no answer: {got[:300]!r}")
    while len(body) < int(length[1]):
        body += _more(connection)
    return body


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise RuntimeError("the server closed the connection")
    return data
