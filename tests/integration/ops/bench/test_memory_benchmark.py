"""A benchmark compares ranks' memory with their need."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from control.placement.need import RankNeed
from ops.bench.engine.memory import Taken, compared, memory
from worker.native.library import threads_here


@pytest.mark.parametrize(("peak", "holds"), [(89, True), (100, True), (101, False), (80, False)])
def test_a_need_is_neither_below_the_peak_nor_far_above_it(peak: int, holds: bool) -> None:
    need = RankNeed(weights=50, kv=30, step=10, process=10)
    assert all(figure.holds for figure in compared("m", need, Taken(start=0, peak=peak))) == holds


@pytest.mark.skipif(threads_here() is None, reason="no compiler")
def test_a_rank_takes_at_most_what_it_needs(tmp_path: Path) -> None:
    run = CliRunner().invoke(memory, ["--case", "tiny:int8", "--kv-tokens", "2048", "--models", str(tmp_path)])
    assert "needs" in run.output and "taken" in run.output
    assert run.exit_code == 0 and "MISSED" not in run.output, run.output
