"""The replica to give up when memory is short."""

from __future__ import annotations

import pytest

from control.constants import MEMORY_DEATHS_MS
from control.replicas.memory_deaths import HostMemory, MemoryDeath, Occupant, to_give_up, why

GIB = 2**30
NOW = 10_000_000


def death(seconds_ago: float, pid: int, model: str = "a", rank: int = 0) -> MemoryDeath:
    return MemoryDeath(at_ms=NOW - round(1000 * seconds_ago), pid=pid, model=model, replica="r0", rank=rank)


def occupant(model: str, minutes_ago: float, used: int = GIB, ranks: int = 1) -> Occupant:
    loaded_ms = NOW - round(60_000 * minutes_ago)
    return Occupant(model=model, replica="r0", loaded_ms=loaded_ms, ranks=ranks, used_bytes=used)


OLD, YOUNG = occupant("a", 60), occupant("b", 8)


@pytest.mark.parametrize("victims", ["aaa", "bbb", "aba"])
def test_at_the_third_death_the_one_that_came_last_goes(victims: str) -> None:
    """Whichever the kernel chose, and however far apart they lie within ten minutes."""
    deaths = [death(200 * (2 - number), number, model) for number, model in enumerate(victims)]
    assert to_give_up(deaths, [OLD, YOUNG], NOW) is YOUNG
    assert to_give_up(deaths, [YOUNG, OLD], NOW) is YOUNG
    assert to_give_up(deaths[1:], [OLD, YOUNG], NOW) is None


def test_a_model_alone_goes_too() -> None:
    deaths = [death(seconds, seconds) for seconds in (30, 20, 10)]
    assert to_give_up(deaths, [OLD], NOW) is OLD
    assert to_give_up(deaths, [], NOW) is None


def test_what_was_long_ago_does_not_count() -> None:
    """Ten minutes, to the millisecond."""
    deaths = [death(MEMORY_DEATHS_MS / 1000, 1), death(20, 2), death(10, 3)]
    assert to_give_up(deaths, [OLD], NOW) is None
    deaths[0] = death(MEMORY_DEATHS_MS / 1000 - 1, 1)
    assert to_give_up(deaths, [OLD], NOW) is OLD


def test_a_load_begins_the_count_anew() -> None:
    """The operator loaded the model again, smaller perhaps: what was before says nothing of it."""
    deaths = [death(90, 1), death(70, 2), death(10, 3)]
    assert to_give_up(deaths, [OLD, occupant("b", 1.4)], NOW) is None
    assert to_give_up(deaths, [OLD, occupant("b", 2)], NOW) is not None


def test_one_end_counts_once() -> None:
    """Ranks of one replica that die together; but not those of two replicas."""
    together = [death(30.0, 1), death(29.9, 2, rank=1), death(29.8, 3, rank=2), death(10, 4)]
    assert to_give_up(together, [OLD], NOW) is None
    assert to_give_up([death(30.0, 1, "a"), death(29.9, 2, "b"), death(10, 3)], [OLD, YOUNG], NOW) is YOUNG


def test_the_cause_has_the_figures() -> None:
    """What each used, the limit, the host's memory, and what to do."""
    text = why(
        "h1",
        occupant("b", 1, int(2.5 * GIB), 2),
        [occupant("a", 9, 3 * GIB)],
        HostMemory(limit=4 * GIB, total=24 * GIB),
    )
    for part in (
        "lack of memory on host h1",
        "killed 3 times in 10 minutes",
        "b (r0, 2 ranks) up to 2.5 GiB, which was loaded last",
        "beside it a (r0, 1 rank) up to 3 GiB",
        "the control group's limit is 4 GiB, the host has 24 GiB",
        "--kv-tokens",
    ):
        assert part in text
    alone = why("h1", occupant("b", 1), [], HostMemory(limit=0, total=24 * GIB))
    assert "loaded last" not in alone and "beside" not in alone and "limit" not in alone
