"""Waits for other ranks are counted; and how a forward counts them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
import torch.distributed as dist

from tests.unit.worker.collective.groups import group
from tests.waiting import until
from worker.collective import shared_memory
from worker.collective.base import Collective, Solo, Waits
from worker.collective.torch.process_group import ProcessGroupCollective

LATE_S = 0.3


def forward(rank: Collective) -> None:
    """Two exchanges; to each the second rank comes late."""
    rank.waits.begin()
    try:
        for _ in range(2):
            time.sleep(LATE_S * rank.rank)
            rank.all_reduce(torch.ones(3))
    finally:
        rank.waits.end()


def check(first: Waits, second: Waits) -> None:
    """Where the first exchange ends a forward begins; from then on the first rank waits."""
    (took, waited), (other_took, other_waited) = first.read(), second.read()
    assert LATE_S * 0.9 < waited <= took < LATE_S * 20
    assert other_took >= LATE_S * 0.9 and other_waited < LATE_S / 3


def test_the_rank_that_comes_first_waits_and_the_late_one_does_not() -> None:
    """A broadcast between two forwards counts in neither."""
    with group(2) as threads:
        first, second = threads.ranks[0].waits, threads.ranks[1].waits
        threads.each(forward)
        check(first, second)
        before = first.read(), second.read()
        threads.each(lambda rank: rank.broadcast(torch.ones(1), source=1) if rank.rank == 0 else late(rank))
        assert (first.read(), second.read()) == before
        assert threads.exchanges[0].waited_s() > before[0][1] + LATE_S / 2


def late(rank: Collective) -> None:
    time.sleep(LATE_S)
    rank.broadcast(torch.ones(1), source=1)


def test_a_long_wait_counts_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any thread; a short one counts once it has ended, by the time at which the peer came."""
    with group(2) as threads:
        waiting = threads.pool.submit(threads.ranks[0].all_reduce, torch.ones(3))
        time.sleep(0.05)
        assert threads.exchanges[0].waited_s() == 0.0
        monkeypatch.setattr(shared_memory, "LONG_NS", 1_000_000)
        until(lambda: threads.exchanges[0].waited_s() > 0.05, 40.0)
        assert not waiting.done()
        threads.ranks[1].all_reduce(torch.ones(3))
        waiting.result(40.0)
        assert threads.exchanges[0].waited_s() > 0.05 and threads.exchanges[1].waited_s() < 0.05


def test_gloo_counts_its_collectives() -> None:
    """A wait and a transfer together: the late rank still waits for none."""
    store = dist.HashStore()

    def joined(rank: int) -> ProcessGroupCollective:
        return ProcessGroupCollective(cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, 2)))

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(joined, range(2)))
        list(pool.map(forward, ranks))
    check(ranks[0].waits, ranks[1].waits)


def test_a_rank_alone_and_a_forward_without_an_exchange_count_nothing() -> None:
    """There is no other rank to wait for."""
    alone = Solo()
    forward(alone)
    assert alone.waits.read() == (0.0, 0.0) and not alone.waits.fresh
