"""Ranks share memory across processes: what kills one, and what is left of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from control.errors import CollectiveFailed
from tests.integration.worker.engine.ranks import RankGroup
from worker.collective import Collective

SHARED, SOCKETS = "SharedMemoryCollective", "ProcessGroupCollective"


@pytest.fixture
def own_ranks(tmp_path: Path) -> Iterator[RankGroup]:
    """Two processes of this test alone."""
    group = RankGroup(2, tmp_path)
    yield group
    group.stop()


def exchanged(collective: Collective) -> list[Tensor]:
    """One collective of each kind."""
    generator = torch.Generator().manual_seed(collective.rank)
    mine = torch.randn(3, 1000, generator=generator)
    return [
        collective.all_reduce(mine.clone()),
        collective.all_gather(mine),
        collective.broadcast(mine.clone()),
    ]


def rows_that_change(collective: Collective) -> tuple[bool, int]:
    """The collective's word on itself, and how many of 16 rows have another sum beside others than alone."""
    rows = torch.randn(16, 896, generator=torch.Generator().manual_seed(collective.rank))
    together = collective.all_reduce(rows.clone())
    alone = [collective.all_reduce(row.clone()) for row in rows.split(1)]
    return collective.batch_invariant, sum(
        not torch.equal(one, row) for one, row in zip(torch.cat(alone), together, strict=True)
    )


def wait_for_the_other(collective: Collective) -> str:
    """How a wait for a rank that never comes ends."""
    try:
        collective.all_reduce(torch.ones(1))
    except CollectiveFailed as error:
        return f"{type(error).__name__}: {error}"
    return "it came"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("members", [2, 4])
def test_processes_exchange_what_sockets_would(ranks: RankGroup, members: int) -> None:
    """Equal to gloo but for the order of the sum, and the same bits on every rank, beside other rows or alone. gloo's
    ring has that property with two ranks only, and says so."""
    assert ranks.form(members) == [SHARED] * members
    found = ranks.ask("run", exchanged)
    assert ranks.ask("run", rows_that_change) == [(True, 0)] * members
    assert ranks.form(members, refuses=members - 1) == [SOCKETS] * members
    expected = ranks.ask("run", exchanged)
    assert all(steady == (not changed) == (members == 2) for steady, changed in ranks.ask("run", rows_that_change))
    for one in found:
        assert all(torch.equal(*pair) for pair in zip(one, found[0], strict=True))
    for mine, theirs in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_missed_and_leaves_nothing(own_ranks: RankGroup, victim: int) -> None:
    """Its peer gets an error that names it; no shared memory has a name that could stay behind."""
    assert own_ranks.form(2) == [SHARED] * 2
    survivor, pid = 1 - victim, own_ranks.pid(victim)
    os.kill(pid, signal.SIGSTOP)
    own_ranks.tell("run", wait_for_the_other)
    os.kill(pid, signal.SIGKILL)
    [said] = own_ranks.answers([survivor])
    assert said == f"CollectiveFailed: rank {victim} (pid {pid}) has died"
    mapped = Path(f"/proc/{own_ranks.pid(survivor)}/maps").read_text(encoding="utf-8").splitlines()
    assert [line for line in mapped if "/dev/shm/" in line and not line.endswith("(deleted)")] == []


@pytest.mark.timeout(60)
def test_a_group_goes_on_in_another_one(ranks: RankGroup) -> None:
    """Ranks that lost each other meet again, and count anew."""
    ranks.form(2)
    ranks.ask("run", exchanged)
    ranks.form(2)
    assert [len(one) for one in ranks.ask("run", exchanged)] == [3, 3]
