"""Random farms find no violation of memory; and find one where needs are not planned with."""

from __future__ import annotations

import re
from typing import Any

import pytest
from click.testing import CliRunner

from control.placement.give_back import KvUse
from control.placement.rollout import plan
from ops.bench.control import placement as bench


def test_no_violation_in_some_random_farms() -> None:
    run = CliRunner().invoke(bench.placement, ["--farms", "40"])
    assert run.exit_code == 0, run.output
    assert re.search(r"40 farms, \d+ changes", run.output) and "MISSED" not in run.output


def test_the_control_without_needs_exceeds_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assignments have the memory of their ranks, and the planner does not look at what a host has."""

    def careless(specs: Any, hosts: Any, held: Any, *states: Any, needs: Any, uses: Any) -> Any:
        large = [bench.Host(host.id, memory=2**50, drained=host.drained) for host in hosts]
        return plan(specs, large, held, *states, needs=needs, uses=uses)

    monkeypatch.setattr(bench, "plan", careless)
    run = CliRunner().invoke(bench.placement, ["--farms", "5"])
    assert run.exit_code == 1 and re.search(r"host exceeded +\d+ .*MISSED", run.output), run.output


def test_the_control_that_does_not_wait_for_leaders_takes_what_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is assigned at once, as if every leader did with it."""

    def hasty(specs: Any, hosts: Any, held: Any, *states: Any, needs: Any, uses: Any) -> Any:
        done = {place: KvUse(used=0, limit=0) for place in uses}
        return plan(specs, hosts, held, *states, needs=needs, uses=done)

    monkeypatch.setattr(bench, "plan", hasty)
    run = CliRunner().invoke(bench.placement, ["--farms", "200"])
    assert run.exit_code == 1 and re.search(r"more KV memory used than assigned +\d+ .*MISSED", run.output), run.output
