"""Progress of a wait is shown: bytes of a model's best replica, bars on a terminal, few lines elsewhere."""

from __future__ import annotations

import sys

import pytest

from control.replicas.health import Beat, Status
from control.replicas.model_overviews import Overview, ReplicaOverview, loading_bytes
from ops.cli.progress import LINES_EVERY_S, Stage, Waiting, stage_of


def replica(done: int, total: int) -> ReplicaOverview:
    return ReplicaOverview("r0", 1, "loading", "rank 0", "h", [], 1, 0, [], None, done, total)


def test_the_stage_is_that_of_the_replica_that_is_furthest() -> None:
    overview = Overview("m", "loading", "rank 0 is loading: 5 %", 0, 1, 2, 0, None, [replica(1, 20), replica(9, 10)])
    assert stage_of(overview) == Stage("m: rank 0 is loading: 5 %", 9, 10)
    away = Overview("m", "poisoned", "rank 0: hang", 0, 1, 1, 0, None, [])
    assert stage_of(away) == Stage("m: poisoned (rank 0: hang)")


def test_bytes_are_those_of_a_download_then_of_all_ranks() -> None:
    def beat(phase: str, read: int) -> Beat:
        return Beat(
            epoch=1,
            seq=0,
            oldest_pending_ms=0,
            device="cpu",
            memory_bytes=0,
            phase=phase,
            pid=1,
            host="h",
            read_bytes=read,
            weight_bytes=100,
        )

    beats = [beat("loading", 40), beat("ready", 100)]
    download = Status(state="starting", downloaded_bytes=3, download_bytes=9)
    running = Status(state="running", downloaded_bytes=9, download_bytes=9)
    assert loading_bytes("loading", download, []) == (3, 9)
    assert loading_bytes("loading", running, beats) == (140, 200)
    assert loading_bytes("loading", running, beats[1:]) == loading_bytes("loaded", running, beats) == (0, 0)


def test_a_log_gets_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """And none while nothing changes."""
    now = [0.0]
    with Waiting(clock=lambda: now[0]) as waiting:
        for done in range(100):
            waiting.show(Stage("m: loading", done * 10**6, 100 * 10**6))
            now[0] += LINES_EVERY_S / 25
        for _ in range(100):
            waiting.show(Stage("m: waits"))
            now[0] += LINES_EVERY_S
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["furrow: m: loading, 0.0 of 100.0 MB", "furrow: m: loading, 25.0 of 100.0 MB"]
    assert lines[4:] == ["furrow: m: waits"]


def test_a_long_error_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Each try has the same one: only what changed is printed. Short texts and other errors are printed whole."""
    now, error = [0.0], f"m: the hub can't be reached: {'no connection, ' * 20}at all. Check it."
    with Waiting(clock=lambda: now[0]) as waiting:
        for text in (
            f"{error} Next try in 0.5 s.",
            f"{error} Next try in 1 s.",
            f"{error} Next try in 1 s.",
            "m: waits",
        ):
            waiting.show(Stage(text))
            now[0] += LINES_EVERY_S
        for text in ("m: a. Part 1.", "m: a. Part 2.", error, f"{error[:-1]} again."):
            waiting.show(Stage(text))
            now[0] += LINES_EVERY_S
    lines = [line.removeprefix("furrow: ") for line in capsys.readouterr().err.splitlines()]
    assert lines[:3] == [f"{error} Next try in 0.5 s.", "… Next try in 1 s.", "m: waits"]
    assert lines[3:] == ["m: a. Part 1.", "m: a. Part 2.", error, "… Check it again."]


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With bytes, rate and time left; a stage without bytes has none of them."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("NO_COLOR", "1"), ("FORCE_COLOR", "")):
        monkeypatch.setenv(name, value)
    waiting = Waiting()
    assert waiting._bar is not None
    waiting.show(Stage("m: waits"))
    assert "B" not in "".join(str(one) for one in _cells(waiting))
    waiting.show(Stage("m: loading", 40 * 10**6, 100 * 10**6))
    assert any("40.0/100.0 MB" in one for one in _cells(waiting))


def _cells(waiting: Waiting) -> list[str]:
    bar = waiting._bar
    assert bar is not None
    return [str(column(bar.tasks[0])) for column in bar.columns if not isinstance(column, str)]
