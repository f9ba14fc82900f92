"""The parts of a dimension that the ranks of a group keep."""

from __future__ import annotations


def share(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """The rank's interval of `size` things; intervals differ by at most one where it does not divide."""
    return size * rank // world_size, size * (rank + 1) // world_size


def padded_share(size: int, rank: int, world_size: int) -> tuple[int, int, int]:
    """(start, stop, width): intervals of equal `width`, the last ones short or empty. For what is gathered."""
    width = -(-size // world_size)
    return min(size, rank * width), min(size, (rank + 1) * width), width


def bordered_share(size: int, borders: tuple[int, ...], rank: int, world_size: int) -> tuple[int, int]:
    """The rank's interval of `size` things, cut at multiples of the first of `borders` that leaves each rank something,
    and of 1 where none does."""
    for border in borders:
        if size % border == 0 and size // border >= world_size:
            start, stop = share(size // border, rank, world_size)
            return start * border, stop * border
    return share(size, rank, world_size)


def ends_at(size: int, border: int, borders: tuple[int, ...], world_size: int) -> bool:
    """True if the bordered shares of all ranks end at multiples of `border`."""
    return all(bordered_share(size, borders, rank, world_size)[0] % border == 0 for rank in range(1, world_size))
