"""One look at a replica: for the agents of its hosts, and for the overview of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from control.redis.connection import Call
from control.replicas.health.beats import Beat, epoch_of, read_beat
from control.replicas.health.poisoning import Poison, poison_of
from control.replicas.health.status import Status, status_of


@dataclass(frozen=True, slots=True)
class Look:
    """The newest epoch, its poison, the agents' status, and the last heartbeat of each rank."""

    epoch: int
    poison: Poison | None
    status: Status | None
    beats: list[Beat | None]

    @classmethod
    def of(cls, replies: Sequence[Any]) -> Look:
        """From the replies to the calls of `look_at`."""
        epoch, poison, status, *beats = replies
        return cls(epoch, poison, status, beats)


def look_at(model: str, replica: str, tp: int) -> list[Call[Any]]:
    """The calls whose replies make a Look at a replica of `tp` ranks."""
    beats = (read_beat(model, replica, rank) for rank in range(tp))
    return [epoch_of(model, replica), poison_of(model, replica), status_of(model, replica), *beats]
