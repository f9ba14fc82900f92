"""The judgement of slow ranks."""

from __future__ import annotations

import pytest

from control.replicas.health import Beat, slow_ranks


def beat(forward_ms: int, waited_ms: int, epoch: int = 5) -> Beat:
    return Beat(
        epoch=epoch,
        seq=1,
        oldest_pending_ms=0,
        device="cpu",
        memory_bytes=1,
        phase="ready",
        pid=1,
        host="h",
        forward_ms=forward_ms,
        waited_ms=waited_ms,
    )


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([(4000, 3900), (4000, 40)], [1]),
        ([(4000, 0), (4000, 2100), (4000, 3000), (4000, 3999)], [0]),
        ([(4000, 10), (4000, 3000), (4000, 20), (4000, 3000)], [0, 2]),
        ([(4000, 1200), (4000, 900)], []),
        ([(4000, 3900), (4000, 500)], []),
        ([(4000, 1900), (4000, 0)], []),
        ([(4000, 0), (4000, 3000), (4000, 1200)], []),
        ([(4000, 0), (4000, 0)], []),
        ([(4000, 3900), (400, 0)], []),
        ([(0, 0), (0, 0)], []),
        ([(4000, 0)], []),
        ([], []),
    ],
)
def test_a_rank_is_slow_if_all_others_wait_for_it(times: list[tuple[int, int]], slow: list[int]) -> None:
    """Two slow ones too; none where waits are spread, as on a busy machine, or too little was computed."""
    assert slow_ranks([beat(*one) for one in times]) == slow


def test_a_silent_rank_and_one_of_another_epoch_allow_no_judgement() -> None:
    """Their waits are not those of the same forwards."""
    waits, never = beat(4000, 3900), beat(4000, 0)
    assert slow_ranks([waits, never, None]) == []
    assert slow_ranks([waits, beat(4000, 0, epoch=4)]) == []
