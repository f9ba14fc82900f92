"""The fan-out benchmark counts whole answers: in whatever pieces they come."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.bench.fanout.fanout import StreamReport, figures
from ops.bench.fanout.leaders import TOKENS, Ring, StreamLoad
from ops.bench.fanout.readers import WARM_UP, Arrivals, Reader, overhead_ms
from ops.bench.fanout.readers import read as read_streams
from ops.harness.processes import ProcessEnded, calling
from ops.harness.program import summarise

LOAD = StreamLoad(clients=1, replicas=1, rate=10.0, tokens=3)
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
    reader = Reader(0, server.getsockname(), LOAD, ring)
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
    assert other.recv(100).startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


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
    reports = [StreamReport(name, LOAD, arrivals, {"clients": 0.9, "api": 0.5}) for name in ("half load", "full load")]
    reports.append(StreamReport("calls", LOAD, arrivals, {"clients": 0.9, "api": 0.8}))
    assert [figure.holds for figure in figures(reports, None)] == [False] * 5


def test_a_part_by_itself_is_judged_by_itself() -> None:
    """Without streams only the whole answers' figure is left, and a slow one misses it."""
    assert [figure.holds for figure in figures([], summarise([1.0]))] == [True]
    assert [figure.holds for figure in figures([], summarise([2.5]))] == [False]


def answering(server: socket.socket, answers: list[bytes]) -> None:
    """Answer one request after the other, each answer in two pieces; an empty answer hangs up."""
    connection, _ = server.accept()
    with connection:
        for answer in answers:
            got = b""
            while not got.endswith(b'"max_tokens": 3}'):
                if not (data := connection.recv(65536)):
                    return
                got += data
            if not answer:
                return
            connection.sendall(answer[:30])
            connection.sendall(answer[30:])


def whole(tokens: int, status: bytes = b"200 OK") -> bytes:
    body = b'{"usage": {"completion_tokens": %d}}' % tokens
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [(whole(3), None), (whole(2), "not whole"), (whole(3, b"503 Busy"), "no answer"), (b"", "closed")],
)
def test_only_whole_answers_are_timed(server: socket.socket, tmp_path: Path, answer: bytes, wrong: str | None) -> None:
    """The leader's time is taken off; a short answer, a refusal or an end of the connection ends the measurement."""
    address, ring = server.getsockname(), tmp_path / "ring"
    Ring(ring, 1).times[0] = 1000.0
    thread = threading.Thread(target=answering, args=(server, [answer] * (WARM_UP + 2)))
    thread.start()
    try:
        if wrong is None:
            overhead = overhead_ms(address, ring, 2, 3)
            assert -1e6 <= overhead.p50 < -900_000  # milliseconds
        else:
            with pytest.raises(RuntimeError, match=wrong):
                overhead_ms(address, ring, 2, 3)
    finally:
        server.close()
        thread.join()


def test_a_refusing_server_ends_the_measurement(
    server: socket.socket, ring: Ring, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message is one line with the answer of the server."""

    def refuse() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 429 Too Many Requests\r\n\r\nslower")
            connection.recv(65536)

    refusing = threading.Thread(target=refuse)
    refusing.start()
    cores = os.sched_getaffinity(0)
    address = server.getsockname()
    ended = pytest.raises(ProcessEnded, match=r"ops\.bench\.fanout\.readers:read ended with status 1")
    ring_path = tmp_path / "ring"
    with calling(cores, read_streams, address=address, ring=ring_path, load=LOAD, seconds=1.0) as reading, ended:
        reading.await_line("begin")
    refusing.join()
    assert capfd.readouterr().err.startswith("ops.bench.fanout.readers:read: client 0: HTTP/1.1 429")
