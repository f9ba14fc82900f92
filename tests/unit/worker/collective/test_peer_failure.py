"""A leader's failed collective is another rank's failure."""

from __future__ import annotations

import pytest

from control.errors import CollectiveFailed, GroupError, RankError
from worker.collective.torch.process_group import met
from worker.leader.serving import met_in_collective


def forward_failed(cause: Exception) -> GroupError:
    """As the engine and the group wrap what a forward raises."""
    error = RankError(0, "forward_failed", str(cause))
    error.__cause__ = cause
    return GroupError("step", error, [])


def test_what_a_backend_raises_is_named() -> None:
    """With its own words, and as its cause."""
    with pytest.raises(CollectiveFailed, match="closed by peer") as caught, met():
        raise RuntimeError("Connection closed by peer")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failed_collective_is_told_from_a_failed_forward() -> None:
    """However deep it lies; where only other ranks failed, the step did."""
    assert met_in_collective(forward_failed(CollectiveFailed("a collective failed")))
    assert not met_in_collective(forward_failed(MemoryError("too large")))
    assert not met_in_collective(GroupError("step", None, [RankError(1, "forward_failed", "too large")]))
