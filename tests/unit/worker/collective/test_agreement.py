"""Ranks agree whether all are ready."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed as dist

from control.errors import CollectiveLeft
from worker.collective.base import Abort
from worker.collective.rendezvous import all_ready


@pytest.mark.parametrize("failing", [None, 0, 2])
def test_all_hear_the_same(failing: int | None) -> None:
    """Every rank is told that all are ready, or that one is not."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda rank: all_ready(store, rank, 3, rank != failing, 20.0), range(3)))
    assert answers == [failing is None] * 3


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_told() -> None:
    """After its patience a rank goes on without."""
    assert not all_ready(dist.HashStore(), 0, 2, True, 0.05)


def test_waiting_ends_with_the_epoch() -> None:
    """A rank that died is found by others, who end the epoch: nobody waits for it here."""
    abort = Abort()
    abort.say("rank 1 died")
    with pytest.raises(CollectiveLeft, match="rank 1 died"):
        all_ready(dist.HashStore(), 0, 2, True, 20.0, abort.check)
