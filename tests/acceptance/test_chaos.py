"""A short seeded chaos run, as an operator would start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.farm import clean_environment

pytestmark = pytest.mark.timeout(240)


def chaos(report: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and output of `furrow chaos`."""
    command = [sys.executable, "-m", "control.cli", "chaos", "--report", str(report), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=clean_environment())
    return done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr


def test_no_stream_is_lost_in_a_short_run(tmp_path: Path) -> None:
    """One strike of each of five kinds under sixteen streams: all proved, every stream exact."""
    kinds = "rank-kill,leader-kill,api-kill,exit-in-collective,out-of-memory"
    status, report, output = chaos(
        tmp_path / "report.json", "--kinds", kinds, "--times", "1", "--streams", "16", "--length", "96", "--seed", "11"
    )
    assert status == 0, output
    assert [row["proved"] for row in report["kinds"]] == [1] * 5
    assert all(row["streams"] == row["exact"] > 0 for row in report["kinds"])
    assert report["streams"] == report["exact"] >= 16


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    """The answer lists what there is."""
    status, _, output = chaos(tmp_path / "report.json", "--kinds", "rank-kil")
    assert status != 0 and "rank-kil" in output and "rank-kill, leader-kill" in output
