"""The benchmark of attacks sees each attack refused: it ends by itself, and each row of it does what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from control.process import child_environment
from ops.bench.hostile.attacks import QUICK, SLOW, figures
from ops.bench.hostile.hostile import NUMBERS, measure
from ops.bench.hostile.neighbour import TOKENS
from ops.harness.processes import split_cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the API process has a core of its own")
@pytest.mark.timeout(240)
def test_every_attack_is_refused() -> None:
    """How late the tokens were is judged on a quiet machine."""
    command = [
        sys.executable,
        "-m",
        "ops.bench",
        "hostile",
        "--row",
        "attacks",
        "--clients",
        "4",
        "--seconds",
        "1",
        "--runs",
        "1",
    ]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=220)
    lines = {line[:48].strip(): line for line in done.stdout.splitlines() if line.endswith(("holds", "MISSED"))}
    refusals = {name: line for name, line in lines.items() if ": refused of " in name}
    assert len(refusals) == len(QUICK) + len(SLOW), done.stdout + done.stderr
    missed = [name for name, line in refusals.items() if line.endswith("MISSED")]
    # On a busy machine a client that still sends may meet the end of the connection before it reads the refusal.
    assert all("stalled uploads" in name for name in missed), done.stdout
    assert "password" not in done.stderr  # the parts would warn of one on their command lines
    assert lines["growth of the API's memory"].endswith("holds"), done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the API process has a core of its own")
@pytest.mark.timeout(120)
def test_a_row_sees_attacker_other_tenant_and_claims() -> None:
    """How long the other tenant waited is judged on a quiet machine."""
    own, others = split_cores()
    outcome = measure(own, others, ["cut-8"], 0.5)
    row = outcome.rows[0]
    assert row.deeds.sent >= 8
    assert row.deeds.cut_at
    # One more of each fits where the row ends a moment late.
    assert len(row.report.first_ms) in (4, 5), row.report.failed
    assert len(row.report.health_ms) in (10, 11), row.report.failed
    others_first = min(row.deeds.cut_at) + NUMBERS // 2
    claimed = {claim.number: claim.steps for claim in outcome.claims}
    assert [claimed[others_first + index] for index in range(4)] == [TOKENS] * 4
    assert outcome.quiet is not None


def test_an_attack_that_did_nothing_fails() -> None:
    """As does one that was answered."""
    figures_by_name = dict.fromkeys((*QUICK, *SLOW), (2, 2))
    assert all(figure.holds for figure in figures([10.0], [20.0], [1.0], [figures_by_name]))
    for wrong in ((0, 0), (2, 1)):
        failed = figures([10.0], [20.0], [1.0], [{**figures_by_name, "huge n": wrong}])
        assert [figure.name for figure in failed if not figure.holds] == [f"huge n: refused of {wrong[0]}"]
