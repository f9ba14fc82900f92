"""Kills for lack of memory are counted: as the files of control groups of both versions count them."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker.agent.rank_exits import RECENT_S, MemoryKills


@pytest.mark.parametrize(
    ("own", "file"),
    [
        ("0::/a/b\n", "a/b/memory.events"),
        ("0::/docker/123\n", "memory.events"),
        ("5:cpu:/x\n4:memory:/y\n0::/\n", "memory/y/memory.oom_control"),
    ],
    ids=["version 2", "container", "version 1"],
)
def test_each_kill_is_claimed_once_and_soon(tmp_path: Path, own: str, file: str) -> None:
    """Those before the start count for nothing; neither do those long ago, or a file that is gone for a while."""
    (tmp_path / "own").write_text(own)
    count, clock = tmp_path / "groups" / file, [100.0]
    count.parent.mkdir(parents=True, exist_ok=True)
    count.write_text("low 0\noom 9\noom_kill 7\noom_group_kill 5\n")
    kills = MemoryKills(tmp_path / "groups", tmp_path / "own", lambda: clock[0])
    assert not kills.claim()
    count.write_text("oom_kill 9\n")
    assert [kills.claim() for _ in range(3)] == [True, True, False]
    count.write_text("oom_kill 10\n")
    kills.look()
    clock[0] += RECENT_S + 1
    assert not kills.claim()
    count.unlink()
    kills.look()
    count.write_text("oom_kill 10\n")
    assert not kills.claim()


@pytest.mark.parametrize("own", [None, "0::/\n", "no control groups\n"])
def test_without_a_count_there_is_no_kill(tmp_path: Path, own: str | None) -> None:
    """Nothing is claimed, and nothing fails."""
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert not MemoryKills(tmp_path, tmp_path / "own", machine=tmp_path / "vmstat").claim()


def test_outside_of_a_group_the_machine_s_kills_count(tmp_path: Path) -> None:
    """A group's own count comes first: a kill elsewhere on the machine is none of its processes'."""
    (tmp_path / "own").write_text("0::/\n")
    machine = tmp_path / "vmstat"
    machine.write_text("nr_free_pages 5\noom_kill 3\n")
    kills = MemoryKills(tmp_path, tmp_path / "own", machine=machine)
    machine.write_text("nr_free_pages 5\noom_kill 4\n")
    assert [kills.claim() for _ in range(2)] == [True, False]
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    grouped = MemoryKills(tmp_path, tmp_path / "own", machine=machine)
    machine.write_text("oom_kill 9\n")
    assert not grouped.claim()


def test_kills_without_an_agent_are_claimed_by_the_next(tmp_path: Path) -> None:
    """It goes on from the count of which its predecessor had explained every kill; after a reboot, from now."""
    (tmp_path / "own").write_text("0::/\n")
    count = tmp_path / "memory.events"
    count.write_text("oom_kill 7\n")
    before = MemoryKills(tmp_path, tmp_path / "own")
    count.write_text("oom_kill 8\n")
    before.look()
    count.write_text("oom_kill 9\n")
    after = MemoryKills(tmp_path, tmp_path / "own", unclaimed_from=before.unclaimed_from)
    assert [after.claim() for _ in range(3)] == [True, True, False]
    assert after.unclaimed_from == 9
    assert not MemoryKills(tmp_path, tmp_path / "own", unclaimed_from=100).claim()
