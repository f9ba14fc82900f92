"""The fan-out benchmark's clients count what comes, in whatever pieces, and take only a whole answer for one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.bench.fanning.readers import Arrivals, Reader
from ops.bench.fanning.ring import TOKENS, Ring
from ops.bench.fanning.schedule import Load
from ops.bench.fanout import Seen, figures

LOAD = Load(clients=1, replicas=1, rate=10.0, tokens=3)
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
RID = "f" * 32


def event(seq: int, part: int = 1, data: str = "{}") -> bytes:
    """A chunk of the body with one event."""
    text = f"id: {RID}:{seq}.{part}\ndata: {data}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(text), text)


WHOLE = HEAD + event(0) + event(1) + event(3) + event(3, 4, "[DONE]") + b"0\r\n\r\n"
"""The second token comes with the third, as it does to a slow client."""


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    """Each token was emitted ten milliseconds ago."""
    ring = Ring(tmp_path / "ring", 1)
    for seq in range(TOKENS):
        ring.times[seq] = time.monotonic() - 0.01
    return ring


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def pair(server: socket.socket, ring: Ring) -> Iterator[tuple[Reader, socket.socket]]:
    """A client, and the server's end of its connection."""
    reader = Reader(0, server.getsockname(), "/", LOAD, ring)
    other, _ = server.accept()
    with other, reader.socket:
        yield reader, other


def read(reader: Reader, arrivals: Arrivals, other: socket.socket, piece: bytes) -> None:
    other.sendall(piece)
    reader.read(arrivals)


@pytest.mark.parametrize("size", [1, 7, 50, len(WHOLE)])
def test_each_token_counts_once_however_it_is_cut(pair: tuple[Reader, socket.socket], size: int) -> None:
    """All tokens are counted and timed, and a client that has its answer asks again."""
    reader, other = pair
    arrivals = Arrivals()
    for start in range(0, len(WHOLE), size):
        read(reader, arrivals, other, WHOLE[start : start + size])
    assert (arrivals.tokens, arrivals.answers, sum(arrivals.latency)) == (3, 1, 3)
    assert arrivals.summary(1.0)["p50_ms"] >= 10
    assert other.recv(100).startswith(b"POST / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "wrong",
    [
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n",
        HEAD + event(2) + event(1),
        HEAD + event(1) + event(1, 4, "[DONE]") + b"0\r\n\r\n",
        HEAD + event(3) + b"0\r\n\r\n",
    ],
    ids=["refused", "backwards", "short", "without an end"],
)
def test_what_is_no_whole_answer_ends_the_measurement(pair: tuple[Reader, socket.socket], wrong: bytes) -> None:
    """A refusal, tokens out of order, too few of them, no end: none passes for a token that was served."""
    reader, other = pair
    with pytest.raises(ConnectionError, match="client 0"):
        for start in range(0, len(wrong), 60):
            read(reader, Arrivals(), other, wrong[start : start + 60])


def test_a_missed_figure_is_missed() -> None:
    """Too few tokens, late ones, and clients that were busy themselves."""
    arrivals = {"tokens_per_second": 19_000.0, "p99_ms": 11.0}
    seen = [Seen(name, LOAD, arrivals, {"clients": 0.9}) for name in ("bare", "half load", "full load")]
    assert [figure.holds for figure in figures(seen, None)] == [False] * 4
