"""A short seeded `furrow chaos` run passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.farm import Farm, clean_environment
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)


def chaos(report: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit status, report and output of `furrow chaos`."""
    command = [sys.executable, "-m", "ops.cli", "chaos", "--report", str(report), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=clean_environment())
    return done.returncode, json.loads(report.read_text()) if report.exists() else {}, done.stdout + done.stderr


def test_no_stream_is_lost_in_a_short_run(tmp_path: Path) -> None:
    """One strike of each of four kinds under twelve streams: all proved, every stream exact."""
    what = ("--kinds", "leader-kill,api-kill,exit-in-collective,large-log", "--times", "1", "--log-entries", "20000")
    status, report, output = chaos(tmp_path / "report.json", *what, "--streams", "12", "--length", "64", "--seed", "11")
    assert status == 0, output
    assert [row["proved"] for row in report["kinds"]] == [1] * 4
    assert all(row["streams"] == row["exact"] > 0 for row in report["kinds"])
    assert report["streams"] == report["exact"] >= 12


def test_a_farm_that_runs_already_can_be_struck(farm: Farm, tmp_path: Path) -> None:
    """An operator names its API and its Redis; the leader is killed, and no stream of it is lost."""
    epoch = farm.redis.get("furrow:{demo}:r0:epoch")
    until(farm.ready)
    where = ("--url", f"http://{farm.address}", "--redis", farm.redis_url)
    what = ("--kinds", "leader-kill", "--times", "1", "--streams", "6", "--length", "48")
    status, report, output = chaos(tmp_path / "report.json", *where, *what)
    assert status == 0, output
    assert report["streams"] == report["exact"] >= 6
    assert farm.redis.get("furrow:{demo}:r0:epoch") != epoch


def test_what_a_running_farm_can_t_be_struck_with_is_refused(farm: Farm, tmp_path: Path) -> None:
    """Its agent, its APIs and its Redis are somebody else's."""
    status, _, output = chaos(tmp_path / "report.json", "--url", f"http://{farm.address}", "--kinds", "redis-kill")
    assert status != 0 and "redis-kill" in output and "rank-kill" in output


def test_an_unknown_kind_is_named(tmp_path: Path) -> None:
    """The answer lists what there is."""
    status, _, output = chaos(tmp_path / "report.json", "--kinds", "rank-kil")
    assert status != 0 and "rank-kil" in output and "rank-kill, leader-kill" in output
