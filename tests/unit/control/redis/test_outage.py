"""Outages of Redis in logs and messages."""

from __future__ import annotations

from structlog.testing import capture_logs

from control.errors import RedisUnavailable
from control.redis.outage import SAY_EVERY_S, Outage

GONE = RedisUnavailable("gone")


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_is_said_once_then_seldom_then_that_it_is_over() -> None:
    """Two loops that try ten times a second for half a minute make five lines."""
    clock = Clock()
    outage = Outage(clock)
    with capture_logs() as lines:
        for _ in range(320):
            outage.waits("heartbeat", GONE)
            outage.waits("leader", GONE)
            clock.now += 0.1
        outage.goes_on("leader")
        outage.goes_on("heartbeat")
    assert [line["event"] for line in lines] == [
        "Redis is away; waiting for it",
        *["Redis is still away"] * 3,
        "Redis is back",
    ]
    assert [line["seconds"] for line in lines[1:4]] == [round(SAY_EVERY_S * n) for n in (1, 2, 3)]
    assert lines[-1]["seconds"] == 32.0


def test_it_is_back_when_every_loop_goes_on() -> None:
    """A server that answers reads and refuses writes is still away for those who must write."""
    clock = Clock()
    outage = Outage(clock)
    with capture_logs() as lines:
        outage.waits("heartbeat", GONE)
        outage.waits("leader", GONE)
        outage.goes_on("heartbeat")
        assert outage.seconds == 0.0 and len(lines) == 1
        clock.now += 1.5
        assert outage.seconds == 1.5
        outage.goes_on("leader")
    assert lines[-1]["event"] == "Redis is back" and outage.seconds == 0.0


def test_nothing_is_said_where_nobody_waits() -> None:
    """A turn that works is no news."""
    with capture_logs() as lines:
        Outage().goes_on("heartbeat")
    assert lines == []
