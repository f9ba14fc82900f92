"""`bench control` measures the real loop: a missed limit sets the exit status."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from ops.bench.control import control as control_module
from ops.bench.control.control import control
from ops.bench.control.stepping import Forwards, Turn
from ops.harness.program import Figure

STEPS = 20


def measured(output: str, what: str) -> list[float]:
    return [float(text) for text in re.findall(what, output)]


def test_its_figures_and_a_limit_that_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one and eight rows: times and traffic of each beside their limits, and exit status 1."""
    monkeypatch.setattr(control_module, "ALONE_MS", {1: 1e9, 8: 0.0})
    monkeypatch.setattr(control_module, "BESIDE", 1e9)
    monkeypatch.setattr(control_module, "STEP_S", 0.001)
    monkeypatch.setattr(control_module, "OUTSIDE_MS", 1e9)
    result = CliRunner().invoke(control, ["--steps", str(STEPS), "--tp", "2"], catch_exceptions=False)
    assert result.exit_code == 1, result.output
    assert [line for line in result.output.splitlines() if "MISSED" in line] == [
        line for line in result.output.splitlines() if "8 rows: a step on Redis alone" in line
    ]
    assert len(measured(result.output, r"\n +(\d+) rows: ")) == 4
    for value in measured(result.output, r"(?:claim|replies|scripts) (\d+\.\d+)"):
        assert value > 0
    [outside] = measured(result.output, r"demonstration model, 64 rows: (\d+\.\d+)")
    assert outside > 0
    one, eight = measured(result.output, r"a step: (\d+\.\d) commands sent")
    # emit and fan-out, the rank's reply, and each side's read; a beat more or less in so few steps.
    assert 5 <= one < 7 and 5 <= eight < 7


def test_no_limit_missed_is_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 0."""
    for part in ("alone", "beside", "outside"):
        monkeypatch.setattr(control_module, part, lambda *_: Figure("none", 0, 1))
    assert CliRunner().invoke(control, ["--tp", "1"], catch_exceptions=False).exit_code == 0


def test_what_counts_as_the_control_plane() -> None:
    """Not the step's work, and not the leader's own books."""
    turn = Turn(whole=1.0, exchange=0.25, group=0.125, forwards=Forwards(count=2, work=0.25))
    assert (turn.control, turn.books) == (0.375, 0.375)
