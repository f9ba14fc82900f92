"""Phases of a recovery are timed."""

from __future__ import annotations

import pytest

from control.replicas.health import Formation
from ops.bench.recovery.recovery import TARGETS_MS, AgentStrike, Phases, RankStrike, figures_of, split, table

FORMED = Formation(epoch=7, led=1050, gathered=1060, joined=1100, loaded=1130)


def test_each_phase_has_its_part() -> None:
    """The parts follow each other without a gap, so that their sum is the whole time."""
    phases = split(1000, 1030, FORMED, 1200)
    assert phases == Phases(detect=30, fence=20, respawn=10, rendezvous=40, load=30, prefill=70)


@pytest.mark.parametrize(("poisoned", "detect", "fence"), [(0, 0, 50), (990, 0, 50), (1080, 50, 0)])
def test_a_poison_that_is_missing_or_elsewhere(poisoned: int, detect: int, fence: int) -> None:
    """An epoch that ended without one, or before it was written, still has phases that add up and are not negative."""
    phases = split(1000, poisoned, FORMED, 1200)
    assert (phases.detect, phases.fence) == (detect, fence)


def test_the_table_shows_medians_and_targets() -> None:
    """A line per fault, in the order of the phases, with the sum at its end."""
    phase_splits = [split(1000, 1000 + detect, FORMED, 1200) for detect in (10, 30, 50)]
    lines = table({"rank killed": phase_splits}, TARGETS_MS).splitlines()
    assert lines[0].split() == ["phase,", "median", "ms", *TARGETS_MS, "in", "all"]
    assert lines[1].split() == ["rank", "killed", "30", "20", "10", "40", "30", "70", "200"]
    assert lines[2].split()[-1] == "1500"
    assert len(table({"rank killed": phase_splits}, None).splitlines()) == 2


def strike(detect_ms: int, same: int = 8) -> RankStrike:
    return RankStrike(gap_s=2.5, phases=Phases(detect_ms, 0, 0, 0, 0, 0), same=same, streams=8)


def test_a_stopped_rank_that_is_found_late_is_a_missed_figure() -> None:
    """Also a stream that ended otherwise, and an agent whose ranks were replaced; a kill has no such limit."""
    agent = AgentStrike(pause_s=0.1, adopted_s=1.0, same_processes=True, same=8, streams=8)
    good = {"rank killed": [strike(2100)], "rank stopped": [strike(2000)], "leader stopped": [strike(1500)]}
    assert [one.holds for one in figures_of(good, [agent])] == [True] * 5
    late = good | {"leader stopped": [strike(1500), strike(2001, same=7)]}
    other = AgentStrike(pause_s=0.3, adopted_s=2.1, same_processes=False, same=8, streams=8)
    assert [one.holds for one in figures_of(late, [agent, other])] == [False] * 5
