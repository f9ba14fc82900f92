"""A group of scripted ranks with a scripted part of the leader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from control.commands import (
    AnyCommand,
    BatchChange,
    GenerateStep,
    Init,
    LoadDenseShard,
    Reply,
)
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.integration.worker.scripted_rank import Answer, ScriptedRank, well
from tests.waiting import until
from worker.leader.group import Group
from worker.rank.heartbeat import Progress

WORLD = 3


class ScriptedLeaderPart:
    """Rank 0's own part without a device: joins nothing, samples nothing, and fails where it is told to."""

    world_size = WORLD

    def __init__(self, ranks: list[ScriptedRank]) -> None:
        self.failure: Exception | None = None
        self.joined_after: list[int] = []
        """How many ranks had heard of the rendezvous when the leader joined."""
        self._ranks = ranks

    def answer(self, command: AnyCommand) -> Reply:
        if self.failure is not None and isinstance(command, LoadDenseShard):
            raise self.failure
        return well(0, WORLD, command)

    def join(self, _epoch: int, _address: str) -> None:
        def heard() -> int:
            return sum(any(isinstance(command, Init) for command in rank.heard) for rank in self._ranks)

        until(lambda: heard() == len(self._ranks), 40.0)
        self.joined_after.append(heard())

    @contextmanager
    def step(self, command: GenerateStep) -> Iterator[OwnStep]:
        yield OwnStep(command.seq, self)


@dataclass
class OwnStep:
    """Rank 0's part of a step, whose checksum is its seq."""

    checksum: int
    _part: ScriptedLeaderPart
    forwards: int = 1

    def forward(self) -> None:
        if self._part.failure is not None:
            raise self._part.failure


class Scene:
    """A leader's group and its scripted ranks in one epoch."""

    def __init__(self, redis: ReplicaRedis, answer: Answer) -> None:
        self.redis, self.lease = redis, redis.lead(WORLD)
        self.ranks = [ScriptedRank(redis, self.lease, rank, WORLD, answer) for rank in range(1, WORLD)]
        for rank in self.ranks:
            rank.start()
        self.own = ScriptedLeaderPart(self.ranks)
        self.progress = Progress()
        parts: Any = self.own
        self.group = Group(redis.client, redis.blocking(), self.lease, parts, self.progress, lambda: None, "127.0.0.1")

    def step(self, meanwhile: Callable[[], object] = lambda: None) -> int:
        """The checksum of a step; `meanwhile` runs when it was sent, before the leader's own forward."""
        with self.group.step(BatchChange()) as step:
            meanwhile()
            step.forward()
        return step.checksum

    def load(self, **at: int) -> LoadDenseShard:
        return LoadDenseShard(**at, model_id=MODEL, config_json="{}", safetensors_paths=[])

    def stop(self) -> None:
        for rank in self.ranks:
            rank.stop()
