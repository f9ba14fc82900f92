"""Two replicas isolate a crashing request as soon as one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control import requests
from control.keys import ModelKeys
from control.messages import Assignment, GenerationRequest, ModelSpec, Sampling
from control.records import catalog
from control.redis.connection import run
from control.replicas import health
from control.replicas.health import write_poison
from control.requests import Enqueue
from control.requests.token_log import read_log
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.integration.worker.leader.test_crash_isolation import Gone, innocents, marked, prompts
from tests.waiting import until
from worker.engine.step import Step
from worker.leader import exchange
from worker.leader.group_leader import GroupLeader
from worker.rank.rank_worker import RankWorker
from worker.repository import validation
from worker.repository.assets import read_assets

GONE_AFTER_S = 0.3
RESTART_S = 1.5
"""For a process to start again: longer than the other replica waits before it takes over."""
TOKENS = 24


class Replica:
    """A leader in a thread, begun again a while after it has died, unless it was given up."""

    def __init__(self, farm: TwoReplicas, name: str) -> None:
        self.farm, self.name, self.given_up, self.stopping = farm, name, False, False
        self.ended: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not (self.stopping or self.given_up):
                self.leader = self.farm.leader(self.name)
                if self.stopping:
                    return
                try:
                    self.leader.run()
                    return
                except Gone:
                    time.sleep(RESTART_S)
        except Exception as error:
            self.ended = error

    def stop(self) -> None:
        self.stopping = True
        self.leader.stop()
        self.leader.wake()
        self.thread.join(40)
        assert not self.thread.is_alive() and self.ended is None


class TwoReplicas:
    """Replicas r0 and r1 of a tiny model; whoever feeds the mark dies."""

    def __init__(self, redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.redis, self.keys = redis, ModelKeys(MODEL)
        self.spec = ModelSpec(name=MODEL, source=str(folder), dtype="float64", kv_tokens=4000, replicas=2)
        catalog.put_spec(redis.client, self.spec)
        self.files = validation.inspect(folder)
        self.replicas: dict[str, Replica] = {}
        self.died: list[str] = []
        """The replica of each crash."""
        self.give_up_after: int | None = None
        """Crashes after which the replica that dies is given up."""
        real = Step.forward

        def forward(step: Step, *how: Any) -> Any:
            if any(marked(row.tokens) for row in step.command.change.rows):
                self._die(step.command.epoch)
            return real(step, *how)

        monkeypatch.setattr(Step, "forward", forward)

    def _die(self, epoch: int) -> None:
        name = next(name for name in self.replicas if health.read_epoch(self.redis.client, MODEL, name) == epoch)
        write_poison(self.redis.client, MODEL, name, epoch, 0, "crashed", "killed by SIGSEGV")
        self.died.append(name)
        if len(self.died) == self.give_up_after:
            self.replicas[name].given_up = True
            health.write_status(self.redis.client, MODEL, name, "failed", "its folder is gone")
        raise Gone

    def leader(self, name: str) -> GroupLeader:
        clients = (self.redis.another(), self.redis.blocking(), self.redis.another())
        assignment = Assignment(spec=self.spec, replica=name, ranks=[0], devices=["cpu"])
        assets, rank_worker = read_assets(self.files, None), RankWorker(0, 1, "cpu")
        return GroupLeader(clients, assignment, f"{name}/1", self.files, assets, rank_worker, "127.0.0.1")

    def start(self, *names: str) -> None:
        for name in names:
            self.redis.run(catalog.put_replica(MODEL, name, catalog.Assigned(revision=1, tp=1)))
            self.replicas[name] = Replica(self, name)

    def stop(self) -> None:
        for replica in self.replicas.values():
            replica.stop()

    def ask(self, rid: str, prompt: list[int]) -> None:
        params = GenerationRequest(prompt=prompt, sampling=Sampling(max_tokens=TOKENS, temperature=0.0))
        self.redis.run(requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant="t")))

    def field(self, rid: str, name: str) -> str | None:
        return self.redis.client.hget(self.keys.request(rid), name)

    def answer(self, rid: str) -> list[int | None]:
        until(lambda: self.field(rid, "state") not in ("queued", "running"), 60.0)
        return [entry.token for entry in self.redis.run(read_log(MODEL, rid, 0))]

    def undisturbed(self, asked: dict[str, list[int]]) -> dict[str, list[int | None]]:
        for rid, prompt in asked.items():
            self.ask(f"{rid}-undisturbed", prompt)
        return {rid: self.answer(f"{rid}-undisturbed") for rid in asked}

    def buried(self) -> list[str]:
        return [letter.rid for letter in run(self.redis.client, requests.dead_letters(MODEL))]

    def nothing_left(self) -> bool:
        """No request is marked, and neither docket nor trial is there."""
        marks = [self.redis.client.hget(key, "suspect") for key in self.redis.client.scan_iter(self.keys.request("*"))]
        left = self.redis.client.exists(self.keys.docket, self.keys.trial)
        return marks == [None] * len(marks) and not left


@pytest.fixture
def farm(redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoReplicas]:
    monkeypatch.setattr(exchange, "REPLICA_GONE_S", GONE_AFTER_S)
    monkeypatch.setattr(exchange, "LOOK_EVERY_S", 0.1)
    farm = TwoReplicas(redis, folder, monkeypatch)
    yield farm
    farm.stop()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("give_up_after", [None, 2, 3])
def test_a_crasher_is_found_by_two_replicas_as_by_one(farm: TwoReplicas, give_up_after: int | None) -> None:
    """Each replica that dies stays away for longer than the other waits: what is suspected is not handed to and fro.

    Where a replica is given up in the midst of it, the other one tries its suspects; its own requests are not harmed.
    """
    own_prompts = prompts(8, 3)
    farm.start("r0", "r1")
    expected = farm.undisturbed(innocents(own_prompts))
    farm.give_up_after = give_up_after
    for rid, prompt in own_prompts.items():
        farm.ask(rid, prompt)
    assert {rid: farm.answer(rid) for rid in expected} == expected
    assert farm.answer("r03") == [None] and farm.buried() == ["r03"]
    assert len(farm.died) <= math.ceil(math.log2(8)) + 2, farm.died
    if give_up_after is not None and len(farm.died) > give_up_after:
        given_up, other = farm.died[give_up_after - 1], farm.died[give_up_after]
        assert other != given_up and set(farm.died[give_up_after:]) == {other}
    until(farm.nothing_left, 40.0)
