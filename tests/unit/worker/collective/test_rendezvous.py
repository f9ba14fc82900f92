"""All ranks of a group use shared memory or none: rank 0 decides, and any obstacle is only a reason."""

from __future__ import annotations

import errno
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs

from control.errors import CollectiveLeft
from worker.collective import rendezvous, shared_memory
from worker.collective.base import Abort
from worker.collective.rendezvous import Card, refusal_of
from worker.collective.shared_memory import SharedMemoryCollective
from worker.collective.torch import process_group

compiled = pytest.mark.skipif(shared_memory.library() is None, reason="no C++ compiler here")


def card(**changes: Any) -> Card:
    return Card(**({"pid": 1, "place": "here", "ways": ["native"]} | changes))


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (card(), ""),
        (card(ways=["native", "another"]), ""),
        (card(ways=["another"]), "no way in common"),
        (card(place="there"), "several hosts"),
        (card(refusal="it runs on cuda:1"), "rank 1: it runs on cuda:1"),
    ],
)
def test_all_share_or_none_does(other: Card, why: str) -> None:
    """One rank that is elsewhere, or can't, is enough; the reason says which and why."""
    refusal = refusal_of([card(), other])
    assert why in refusal if why else refusal == ""


def test_more_ranks_than_seats_share_nothing() -> None:
    """The segment has room for so many and no more."""
    assert refusal_of([card()] * shared_memory.MOST_RANKS) == ""
    assert "33 ranks" in refusal_of([card()] * (shared_memory.MOST_RANKS + 1))


@pytest.fixture
def groupless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands for gloo, of which a process can have one rank only."""
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: None)
    monkeypatch.setattr(process_group, "listen", lambda address: (None, 1))
    monkeypatch.setattr(process_group, "reach", lambda place, patience: None)
    monkeypatch.setattr(process_group, "ProcessGroupCollective", lambda group, backend, store: "sockets")


def meet(world_size: int, *, refuses: int | None = None) -> list[Any]:
    """The collective of each rank; all ranks are threads."""
    store = dist.HashStore()
    with ThreadPoolExecutor(world_size) as pool:
        members = [
            pool.submit(rendezvous.join, store, rank, world_size, "cpu", Abort(), rank != refuses)
            for rank in range(world_size)
        ]
        return [member.result() for member in members]


@compiled
def test_ranks_on_one_host_share_memory() -> None:
    """And the first sum is right."""
    with capture_logs() as logs:
        ranks = meet(3)
    with ThreadPoolExecutor(3) as pool:
        sums = list(pool.map(lambda rank: rank.all_reduce(torch.ones(1)).item(), ranks))
    assert sums == [3.0] * 3 and {type(rank) for rank in ranks} == {SharedMemoryCollective}
    assert "the ranks share memory" in [line["event"] for line in logs]
    for rank in ranks:
        rank.close()


@pytest.mark.usefixtures("groupless")
def test_without_a_compiler_all_are_left_to_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one line says why."""
    monkeypatch.setattr(rendezvous.shared_memory, "library", lambda: None)
    with capture_logs() as logs:
        assert meet(2) == ["sockets"] * 2
    [line] = [line for line in logs if line["event"] == "the ranks share no memory"]
    assert line["why"].startswith("rank 0: it has no C++ compiler")


@compiled
@pytest.mark.usefixtures("groupless")
@pytest.mark.parametrize("refuses", [0, 1, 2])
def test_one_rank_that_refuses_leaves_all_to_sockets(refuses: int) -> None:
    """And one line says who it was."""
    with capture_logs() as logs:
        assert meet(3, refuses=refuses) == ["sockets"] * 3
    assert [line["why"] for line in logs if line["event"] == "the ranks share no memory"] == [
        f"rank {refuses}: switched off"
    ]


@compiled
@pytest.mark.usefixtures("groupless")
def test_without_enough_memory_all_are_left_to_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that can't be had is found out before anything is written to it."""

    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_memory()
    with capture_logs() as logs:
        assert meet(2) == ["sockets"] * 2
    [line] = [line for line in logs if line["event"] == "the ranks share no memory"]
    assert "No space left" in line["why"]
    assert open_memory() == before


@compiled
@pytest.mark.usefixtures("groupless")
def test_one_rank_that_can_t_map_it_leaves_all_to_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system forbids a look into another process."""

    def forbidden(pid: int, descriptor: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shared_memory, "open_of", forbidden)
    with capture_logs() as logs:
        assert meet(2) == ["sockets"] * 2
    [line] = [line for line in logs if line["event"] == "the ranks share no memory"]
    assert line["why"].startswith("rank 1: ") and "Permission denied" in line["why"]


def test_a_rank_can_leave_a_rendezvous_that_nobody_comes_to() -> None:
    """Told by another thread, with its reason."""
    abort = Abort()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rendezvous.join, dist.HashStore(), 0, 2, "cpu", abort)
        abort.say("the epoch is over")
        with pytest.raises(CollectiveLeft, match="the epoch is over"):
            waiting.result()


def open_memory() -> list[str]:
    """The shared memory that this process has open."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  # names are enough
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        except OSError:  # the listing's own
            continue
        if "furrow-ranks" in target:
            found.append(target)
    return found


@compiled
def test_the_memory_ends_with_the_group() -> None:
    """It has no name, and a rank that left holds none of it."""
    gc.collect()  # what earlier tests have left
    before = open_memory()
    ranks = meet(2)
    assert len(open_memory()) > len(before)
    for rank in ranks:
        rank.close()
    assert open_memory() == before
