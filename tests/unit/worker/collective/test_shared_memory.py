"""Sums through shared memory are right: for every type and size, and the same bits on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from control.errors import CollectiveFailed, CollectiveLeft
from tests.unit.worker.collective.groups import Threads, group
from worker.collective.shared_memory import SLOT_BYTES, SharedMemoryCollective

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SLOT_FLOATS = SLOT_BYTES // 4


def parts(world_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """The input of each rank."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world_size)]


def in_rank_order(brought: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum as documented: halves in float32, rounded once."""
    wide = [part.float() if dtype in (torch.float16, torch.bfloat16) else part for part in brought]
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    return total.to(dtype)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_is_exactly_that_in_rank_order(world_size: int, dtype: torch.dtype) -> None:
    """Bit for bit, on every rank, whether a slot holds it or not."""
    with group(world_size) as threads:
        for count in (1, 1000, SLOT_FLOATS, 2 * SLOT_FLOATS + 3):
            brought = parts(world_size, (count,), dtype)
            expected = in_rank_order(brought, dtype)
            for found in threads.each(lambda rank, brought=brought: rank.all_reduce(brought[rank.rank].clone())):
                assert found.dtype == dtype and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_whole_numbers_are_summed_exactly(dtype: torch.dtype) -> None:
    """Also those that no float holds."""
    large = 2**61 + 1 if dtype is torch.int64 else 2**29 + 1
    with group(2) as threads:
        found = threads.each(lambda rank: rank.all_reduce(torch.tensor([large, rank.rank], dtype=dtype)))
    assert [one.tolist() for one in found] == [[2 * large, 1]] * 2


def test_a_type_that_has_no_sum_is_refused() -> None:
    """Before anything is exchanged, by its name."""
    with group(2) as threads, pytest.raises(TypeError, match="complex64"):
        threads.ranks[0].all_reduce(torch.zeros(3, dtype=torch.complex64))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_rows_are_gathered_side_by_side(world_size: int, dtype: torch.dtype) -> None:
    """As torch.cat along the last dimension, for rows that fit a slot together, alone, and not at all."""
    with group(world_size) as threads:
        for shape in ((1,), (3, 5), (2, 3, 7), (300, 1000), (2, SLOT_BYTES + 5)):
            brought = parts(world_size, shape, dtype)
            expected = torch.cat(brought, dim=-1)
            for found in threads.each(lambda rank, brought=brought: rank.all_gather(brought[rank.rank])):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64])
def test_a_broadcast_is_the_source_s(source: int, dtype: torch.dtype) -> None:
    """In place, in every size."""
    with group(3) as threads:
        for count in (1, 64, SLOT_FLOATS + 1):
            brought = parts(3, (count,), dtype)
            expected = brought[source].clone()
            for found in threads.each(lambda rank, brought=brought: rank.broadcast(brought[rank.rank], source)):
                assert torch.equal(found, expected)


def test_tensors_with_gaps_are_exchanged_in_place() -> None:
    """A view of another tensor's column, too: only what it shows changes."""

    def job(rank: SharedMemoryCollective) -> tuple[Tensor, Tensor, Tensor]:
        whole = torch.arange(12, dtype=torch.float32).view(4, 3)
        rank.all_reduce(whole[:, 1])
        rank.broadcast(whole[:, 2].mul_(rank.rank + 1))
        return whole[:, 0], whole[:, 1], whole[:, 2]

    with group(2) as threads:
        for first, second, third in threads.each(job):
            assert first.tolist() == [0, 3, 6, 9]
            assert second.tolist() == [2, 8, 14, 20]
            assert third.tolist() == [2, 5, 8, 11]


def test_nothing_is_exchanged_as_well() -> None:
    """Empty tensors come back, and count like any other."""

    def job(rank: SharedMemoryCollective) -> int:
        assert rank.all_reduce(torch.empty(0)).shape == (0,)
        assert rank.all_gather(torch.empty(2, 0)).shape == (2, 0)
        assert rank.all_gather(torch.empty(0, 3)).shape == (0, 6)
        assert rank.broadcast(torch.empty(0)).shape == (0,)
        return rank.count

    with group(2) as threads:
        assert threads.each(job) == [4, 4]


def mixture(rank: SharedMemoryCollective) -> list[Tensor]:
    """Many exchanges of different kinds, the ranks at different speeds."""
    found, generator = [], torch.Generator().manual_seed(rank.rank)
    for turn in range(200):
        mine = torch.randn(1 + turn % 70, generator=generator)
        found.append(rank.all_reduce(mine.clone()))
        found.append(rank.broadcast(mine.clone(), turn % rank.world_size))
        found.append(rank.all_gather(mine))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_slot_is_never_overwritten_too_early(world_size: int) -> None:
    """Broadcasts, in which the source waits for nobody, between sums: every rank sees the same all along."""
    with group(world_size) as threads:
        first, *others = threads.each(mixture)
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


def start_near_the_end(threads: Threads, published: int) -> None:
    """As after so many rounds."""
    for rank, exchange in enumerate(threads.exchanges):
        memory, exchange._group.round = exchange._references[0].memory, published
        with memoryview(memory) as bytes_, bytes_.cast("I") as words:
            words[rank * 32] = published


def test_rounds_are_counted_beyond_32_bits() -> None:
    """A group that serves for weeks goes on where the count starts over."""
    with group(2) as threads:
        start_near_the_end(threads, 2**32 - 5)
        first, other = threads.each(mixture)
    assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_a_rank_at_another_collective_is_named() -> None:
    """Instead of a sum of what does not belong together; nothing is exchanged after that."""

    def job(rank: SharedMemoryCollective) -> str:
        with pytest.raises(CollectiveFailed) as caught:
            rank.all_reduce(torch.zeros(3 + rank.rank))
        with pytest.raises(CollectiveFailed, match=str(caught.value)):
            rank.broadcast(torch.zeros(1))
        return str(caught.value)

    with group(2) as threads:
        found = threads.each(job)
    # The second rank to find it may find the other gone already.
    assert any("is at another collective" in one for one in found)
    assert all(f"rank {1 - rank} " in one for rank, one in enumerate(found))


def test_a_rank_that_was_closed_is_missed_at_once() -> None:
    """Its peers do not wait for the deadline, and itself it can't come back."""
    with group(2) as threads:
        waiting = threads.pool.submit(threads.ranks[0].all_reduce, torch.ones(1))
        threads.ranks[1].close()
        with pytest.raises(CollectiveFailed, match="rank 1 has left"):
            waiting.result()
        with pytest.raises(CollectiveFailed, match="this rank has left"):
            threads.ranks[1].all_reduce(torch.ones(1))


def test_who_is_told_to_leave_leaves() -> None:
    """From another thread, with the reason in the error."""
    with group(2) as threads:
        waiting = threads.pool.submit(threads.ranks[0].all_reduce, torch.ones(1))
        threads.aborts[0].say("the epoch is over")
        with pytest.raises(CollectiveLeft, match="the epoch is over"):
            waiting.result()


def test_nobody_waits_for_ever() -> None:
    """A peer that lives and never comes is named when the last resort has passed."""
    with group(2, deadline_s=0.05) as threads, pytest.raises(CollectiveFailed, match=r"rank 1 .* within 0.05 s"):
        threads.ranks[0].all_reduce(torch.ones(1))
