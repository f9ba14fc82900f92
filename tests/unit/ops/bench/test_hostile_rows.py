"""Rows of `furrow bench hostile`: what attacker and other tenant count, and what misses a limit."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from ops.bench.hostile import neighbour
from ops.bench.hostile.crowd import Crowd, Deeds
from ops.bench.hostile.hostile import (
    CONTROLS,
    MODEL_FILES,
    ROWS,
    Admission,
    AttackResult,
    HostileResults,
    NotMissed,
    figures,
    gone_percent,
    judge,
    rows_of,
)
from ops.bench.hostile.leaders import Claim
from ops.bench.hostile.neighbour import Neighbour, NeighbourReport, Request
from ops.harness.exchange import Address, HttpConnection, RawAnswer, chat
from ops.harness.program import Figure, summarise

RID = "f" * 32
HEALTH = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\nno"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(text: str) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text.encode())


def event(seq: int) -> bytes:
    return chunk(f"id: {RID}:{seq}.1\ndata: {{}}\n\n")


WAITING = STREAM + event(0) + chunk(": queue position 12\n")
WHOLE = WAITING + event(1) + event(2) + END


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("data", "status"), [(HEALTH, 200), (REFUSED, 429), (WHOLE, 200)])
def test_an_answer_is_whole_with_its_last_byte(data: bytes, status: int, size: int) -> None:
    answer = RawAnswer()
    for start in range(0, len(data), size):
        assert not answer.whole
        answer.feed(data[start : start + size])
    assert answer.whole
    assert answer.status == status


class Server:
    """Answers each chat with `stream`, and /health; a pause before the last piece of a chat's answer."""

    def __init__(self, stream: list[bytes]) -> None:
        self._stream = stream
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listening.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                for piece in self._stream if data.startswith(b"POST") else [HEALTH]:
                    time.sleep(0.02)
                    connection.sendall(piece)


@pytest.fixture
def serve() -> Iterator[Any]:
    servers = list[Server]()

    def start(*stream: bytes) -> Server:
        servers.append(Server(list(stream)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def beside(server: Server, seconds: float) -> NeighbourReport:
    other = Neighbour(server.address, "key", "scripted", 1)
    other.run(seconds, lambda: None)
    return other.report


def test_the_first_token_is_timed_and_no_comment_before_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On new and kept connections by turns; with a pause of 20 ms before each piece, the token comes after 60 ms."""
    monkeypatch.setattr(neighbour, "CHAT_EVERY_S", 0.3)  # the first answer must be whole before the third request
    report = beside(serve(WAITING[:100], WAITING[100:], event(1), event(2) + END), 0.7)
    assert report.failed == []
    assert len(report.fresh_ms) + len(report.kept_ms) == 3
    assert len(report.kept_ms) == 1
    assert min(report.first_ms) >= 60
    assert len(report.health_ms) == 14
    assert len(report.late_ms) == 3 + 14


def test_gaps_are_those_between_tokens() -> None:
    """Not before the first one, and one to the end of the wait for a stream that stopped."""
    with selectors.DefaultSelector() as selector:
        exchange, gaps = HttpConnection(selector, ("127.0.0.1", 1)), list[float]()
        request = Request(exchange, time.monotonic(), [], stream=True, keep=True)
        for piece in (WAITING, event(1), chunk(": a comment\n"), event(2)):
            time.sleep(0.01)
            exchange.answer.feed(piece)
            request.look(gaps)
        assert len(gaps) == 1 and gaps[0] >= 20
        time.sleep(0.01)
        request.give_up(gaps)
        assert len(gaps) == 2 and gaps[1] >= 10


@pytest.mark.parametrize(
    ("answer", "why", "times"),
    [(REFUSED, "429", 0), (WAITING + END, "queue position", 0), (WAITING, "queue position", 1)],
)
def test_a_stream_without_a_token_has_failed(
    serve: Any, monkeypatch: pytest.MonkeyPatch, answer: bytes, why: str, times: int
) -> None:
    """Refused, ended without a token, or without an end in time: the last one's wait is a time."""
    monkeypatch.setattr(neighbour, "GIVE_UP_S", 0.1)
    report = beside(serve(answer), 0.01)
    assert len(report.failed) == 1
    assert why in report.failed[0]
    assert len(report.first_ms) == times and all(one >= 100 for one in report.first_ms)


def attack(server: Server, seconds: float, connections: int) -> Crowd:
    end = time.monotonic() + seconds
    return Crowd(server.address, "key", ["scripted"], connections, 100, lambda: time.monotonic() > end)


def test_a_cut_is_noted_with_the_number_of_its_request(serve: Any) -> None:
    crowd, began = attack(serve(WHOLE), 0.05, 2), time.monotonic()
    crowd.cut()
    deeds = crowd.report()
    assert len(deeds.cut_at) >= 2
    assert list(deeds.cut_at) == list(range(100, 100 + len(deeds.cut_at)))
    assert deeds.sent >= len(deeds.cut_at)
    assert all(began + 0.005 <= at <= time.monotonic() for at in deeds.cut_at.values())


def test_a_loop_sends_again_after_a_refusal(serve: Any) -> None:
    crowd = attack(serve(REFUSED), 0.3, 2)
    crowd.loop()
    deeds = crowd.report()
    assert deeds.statuses[429] >= 3
    assert deeds.sent == deeds.statuses[429] + 2


def test_a_burst_is_sent_on_every_connection(serve: Any) -> None:
    crowd = attack(serve(WHOLE), 0.1, 5)
    crowd.burst()
    deeds = crowd.report()
    assert (deeds.sent, deeds.statuses, deeds.bursts) == (5, {200: 5}, 1)


def test_comments_count_once_all_streams_wait(serve: Any) -> None:
    comment = chunk(": queue position 11\n")
    crowd, begun = attack(serve(WAITING, comment), 0.15, 3), list[bool]()
    crowd.wait(lambda: begun.append(True))
    deeds = crowd.report()
    assert begun == [True]
    assert (deeds.waiting, deeds.comment_bytes) == (3, 3 * len(comment))


NAMED = b"HTTP/1.1 422 Unprocessable\r\ncontent-length: 14\r\n\r\nthe model 'b' "


@pytest.mark.parametrize(
    ("answer", "every"), [(NAMED, True), (NAMED.replace(b"'b'", b"'c'"), False), (NAMED.replace(b"422", b"429"), False)]
)
def test_refusals_that_name_their_model_are_counted(serve: Any, answer: bytes, every: bool) -> None:
    """A 422 without the name, and the name with another status, are none."""
    crowd = Crowd(serve(answer).address, "key", ["a", "b"], 2, 100, lambda: crowd.deeds.sent >= 6)
    crowd.loop()
    deeds = crowd.report()
    assert deeds.named == (sum(deeds.statuses.values()) if every else 0) and deeds.statuses


def test_requests_carry_their_number_and_key() -> None:
    request = chat(("127.0.0.1", 80), "scripted", 1234, 2, stream=True, key="secret")
    head, _, body = request.partition(b"\r\n\r\n")
    assert b"authorization: Bearer secret\r\n" in head
    assert b"content-length: %d" % len(body) in head
    assert b"stream 1234" in body


GOOD = NeighbourReport(fresh_ms=[60.0, 70.0], kept_ms=[65.0], gaps_ms=[50.0], health_ms=[2.0], late_ms=[0.1])


def outcome(name: str, **changes: Any) -> HostileResults:
    """One row, in which all limits hold without the changes."""
    row = ROWS[name]
    share, claims = changes.pop("share", 0.05), changes.pop("claims", [Claim(1, 5.0, 2)])
    deeds = Deeds(row.connections, {422: 1}, 1, changes.pop("cut_at", {}), waiting=row.connections)
    measured = AttackResult(row, GOOD, deeds, {"api": share}, 0.0, 10.0)
    measured = replace(measured, **changes)
    return HostileResults(summarise([60.0]), 0.04, Admission(400, 400, 0.9), [measured], claims)


def missed(figures: list[Figure]) -> list[str]:
    return [figure.name for figure in figures if not figure.holds]


@pytest.mark.parametrize("name", ROWS)
def test_a_quiet_row_holds_and_names_fit_the_table(name: str) -> None:
    figure_list = figures(outcome(name))
    assert missed(figure_list) == []
    assert all(len(figure.name) <= 48 for figure in figure_list)


@pytest.mark.parametrize(
    ("name", "changes", "which"),
    [
        (
            "cut-8",
            {"report": NeighbourReport(fresh_ms=[60.0, 561.0], health_ms=[1.0])},
            ["first token p99, beyond quiet p50"],
        ),
        (
            "burst-400",
            {"report": NeighbourReport(kept_ms=[60.0, 2001.0], health_ms=[1.0])},
            ["first token p99, beyond quiet p50", "first token, maximum"],
        ),
        ("loop-512", {"report": NeighbourReport(fresh_ms=[60.0], health_ms=[1.0, 101.0])}, ["/health, maximum"]),
        (
            "loop-512",
            {"report": NeighbourReport(fresh_ms=[60.0], health_ms=[1.0], failed=["429"])},
            ["failed answers of the other tenant"],
        ),
        ("cut-32", {"cut_at": {1: 4.9}}, ["steps for clients that had gone"]),
        ("cut-32", {"deeds": Deeds(sent=31)}, ["requests of the attacker"]),
        ("wait-4000", {"share": 0.07}, ["share of a core for waiting streams"]),
        ("wait-4000", {"deeds": Deeds(waiting=3599)}, ["streams that waited to the end"]),
        (
            MODEL_FILES,
            {"report": NeighbourReport(fresh_ms=[60.0], gaps_ms=[50.0, 101.0], health_ms=[1.0])},
            ["gap between tokens, maximum"],
        ),
        (MODEL_FILES, {"deeds": Deeds(sent=9, named=8, statuses={422: 9})}, ["other answers"]),
        (MODEL_FILES, {"deeds": Deeds(sent=9)}, ["422 with the model's name"]),
        (MODEL_FILES, {"alive": False}, ["ends of the API process"]),
    ],
)
def test_each_limit_is_missed(name: str, changes: dict[str, Any], which: list[str]) -> None:
    assert missed(figures(outcome(name, **changes))) == [f"{name}: {figure}" for figure in which]


def test_a_slow_admission_misses_its_limit() -> None:
    figure_list = figures(HostileResults(admission=Admission(400, 400, 1.1)))
    assert [figure.holds for figure in figure_list] == [False]


def test_only_claims_after_the_cut_are_for_nobody() -> None:
    """Weighed by steps, within the row's time; a client that left after the claim was there."""
    measured = outcome("cut-8", cut_at={1: 2.0, 2: 2.0, 4: 2.0}).rows[0]
    claims = [Claim(1, 3.0, 1), Claim(2, 1.0, 2), Claim(3, 3.0, 1), Claim(4, 11.0, 50)]
    assert gone_percent(claims, measured) == 25
    assert gone_percent([], measured) == 0


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_names_figures_that_there_are_and_must_miss_each(name: str) -> None:
    control = CONTROLS[name]
    figure_list = [figure for row in rows_of(control) for figure in figures(outcome(row))]
    with pytest.raises(NotMissed, match="not missed although"):
        judge(control, figure_list)
    bad = [
        replace(figure, measured=figure.limit + 1) if figure.name in control.kinds else figure for figure in figure_list
    ]
    judge(control, bad)
