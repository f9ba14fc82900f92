"""Waiting requests are logged in few lines: however many they are."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from structlog.testing import capture_logs

from api.observability import LINES, Metrics, RequestLog, WaitLog


@dataclass
class Waiting:
    model: str = "m"
    position: int | None = 7


def request_logs(wait_log: WaitLog, model: str, count: int) -> list[RequestLog]:
    metrics = Metrics()
    made = [RequestLog(metrics, path="/", client_request_id=None) for _ in range(count)]
    for index, request_log in enumerate(made):
        request_log.know(rid=f"{model}-{index}")
        wait_log.add(request_log, Waiting(model))
    return made


async def test_thousands_that_wait_are_a_few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of a model have lines of their own, all together one; who has a token, or has ended, has none."""
    monkeypatch.setattr("api.observability._TICK_S", 0.001)
    wait_log = WaitLog(0.02)
    made = request_logs(wait_log, "many", 1000)
    request_logs(wait_log, "few", 2)
    made[0].first_token()
    made[1].end(status=499, finish_reason=None)
    with capture_logs() as lines:
        async with asyncio.timeout(10):
            while made[-1].waited < 0.02:
                await asyncio.sleep(0.001)
            wait_log.start()
            while sum(line["action"] == "requests_wait" for line in lines) < 2:
                await asyncio.sleep(0.001)
        await wait_log.stop()
    own = [line for line in lines if line["action"] == "request_waits"]
    rids = {line["rid"] for line in own}
    assert rids == {f"many-{index}" for index in range(2, 2 + LINES)} | {"few-0", "few-1"}
    assert all(line["waited_ms"] >= 20 and line["queue_position"] == 7 for line in own)
    together = [line for line in lines if line["action"] == "requests_wait"]
    assert {(line["model"], line["count"]) for line in together} == {("many", 998)}
    assert together[0]["waited_ms"] >= 20
    assert together[1]["waited_ms"] - together[0]["waited_ms"] >= 19, "each is rounded"
