"""A new agent goes on where the last one was: whatever that one was at when it died."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from control.messages import Assignment, ModelSpec
from control.placement import farm, membership
from control.placement.placement import Host as FarmHost
from control.records import catalog
from control.replicas import health
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.supervisor import Host, supervised_host
from tests.waiting import until
from worker.agent import replica as replica_module
from worker.agent.agent import Agent
from worker.agent.planner import Planner
from worker.agent.standby import Standby

HOST = "host"
CONFIG = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
CONFIG |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}

SCRIPT = """#!/bin/sh
# In the place of python: a rank ends with the status that the file of its name says, else it waits to be told to stop.
trap 'exit 0' TERM USR1
echo $$ >> {folder}/pids-$FURROW_RANK
[ -e {folder}/exit-$FURROW_RANK ] && exit $(cat {folder}/exit-$FURROW_RANK)
while :; do sleep 0.02; done
"""


class Scene:
    """A host whose agents run in threads, one after another, on one supervisor."""

    def __init__(self, redis: ReplicaRedis, host: Host, folder: Path) -> None:
        self.redis, self.host, self.folder = redis, host, folder
        self.agent: Agent | None = None
        self.thread = threading.Thread()

    def start_agent(self, standby: bool = False) -> Agent:
        supervisor = self.host.connect()
        keeps = Standby(self.redis.url, supervisor) if standby else None
        self.agent = Agent(self.redis.another(), self.redis.url, FarmHost(HOST), supervisor, keeps)
        self.thread = threading.Thread(target=self.agent.run, daemon=True)
        self.thread.start()
        return self.agent

    def lose_agent(self) -> None:
        """It ends between two turns, as any kill does for the processes that it had."""
        assert self.agent is not None
        self.agent.leaving = True
        self.thread.join(40)
        self.host.lose_agent()

    def want(self) -> None:
        spec = ModelSpec(name=MODEL, source=str(self.folder / "model"), tp=2, devices=["cpu", "cpu"])
        catalog.put_spec(self.redis.client, spec)

    def pids(self, rank: int) -> list[int]:
        path = self.folder / f"pids-{rank}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def served(self) -> dict[int, int]:
        """The model is wanted and its processes run."""
        self.want()
        self.start_agent()
        return {rank: until(lambda rank=rank: self.pids(rank), 40.0)[0] for rank in (0, 1)}

    def adopts(self) -> Agent:
        """Another agent, which has had a turn."""
        self.redis.client.delete(f"furrow:host:{HOST}")
        agent = self.start_agent()
        until(lambda: self.redis.client.exists(f"furrow:host:{HOST}"), 40.0)
        return agent

    def beat(self, rank: int, epoch: int, pid: int) -> None:
        """The rank's word that it is ready, heard until it is unheard."""
        word = health.Beat(
            epoch=epoch, seq=1, oldest_pending_ms=0, device="cpu", memory_bytes=1, phase="ready", pid=pid, host=HOST
        )
        self.redis.run(health.beat(MODEL, REPLICA, rank, word))
        self.redis.client.persist(self.redis.keys.heartbeat(rank))

    def heard(self, pids: dict[int, int], epoch: int) -> None:
        """The agent has written down that it heard these processes in this epoch."""
        seen = {str(pid): epoch for pid in pids.values()}
        # The supervisor keeps the kernel's count of kills beside the records of replicas.
        until(
            lambda: (
                [one["seen"] for one in self.host.clients[-1].records.values() if isinstance(one, dict)][-1:] == [seen]
            ),
            40.0,
        )

    def status(self) -> dict[str, str]:
        return self.redis.client.hgetall(self.redis.keys.status)


@pytest.fixture
def scene(redis: ReplicaRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    script = tmp_path / "python"
    script.write_text(SCRIPT.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(replica_module, "PAUSES_S", (0.0, 0.0, 0.0))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model/tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(8)}, tmp_path / "model/model.safetensors")
    with supervised_host() as host:
        scene = Scene(redis, host, tmp_path)
        yield scene
        if scene.agent is not None:
            scene.agent.leaving = True
            scene.thread.join(40)


def test_ranks_are_adopted_and_can_be_unloaded(scene: Scene) -> None:
    """The same processes, under the same names; an unload ends them, and the model is forgotten."""
    pids = scene.served()
    scene.lose_agent()
    agent = scene.adopts()
    assert agent.replicas.by_place[MODEL, REPLICA].pids() == pids
    assert all(map(psutil.pid_exists, pids.values())) and scene.pids(0) == [pids[0]]
    assert catalog.tombstone(scene.redis.client, MODEL)
    until(lambda: catalog.get_spec(scene.redis.client, MODEL) is None, 40.0)
    assert not any(map(psutil.pid_exists, pids.values()))


def test_a_rank_that_died_meanwhile_is_started_again_and_its_status_told(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor kept the status. Where the group is in a later epoch by now, that one is not poisoned."""
    pids = scene.served()
    old = scene.redis.lead(2, owner=f"{HOST}/{pids[0]}")
    for rank in (0, 1):
        scene.beat(rank, old.epoch, pids[rank])
    scene.heard(pids, old.epoch)
    scene.lose_agent()
    os.kill(pids[1], signal.SIGSEGV)
    until(lambda: not psutil.pid_exists(pids[1]), 40.0)
    scene.redis.client.delete(scene.redis.keys.lock)
    new = scene.redis.lead(2, owner=f"{HOST}/{pids[0]}")
    scene.redis.client.persist(scene.redis.keys.lock)
    scene.beat(0, new.epoch, pids[0])
    scene.adopts()
    until(lambda: len(scene.pids(1)) == 2, 40.0)
    assert scene.pids(0) == [pids[0]], "its neighbour keeps its process"
    poison = health.read_poison(scene.redis.client, MODEL, REPLICA)
    assert poison is None or poison.epoch != new.epoch
    assert f"rank 1 (pid {pids[1]}) killed by SIGSEGV" in capsys.readouterr().out


def test_a_replica_that_was_given_up_stays_given_up(scene: Scene) -> None:
    """A new agent does not try seven times more, and gives the same reason."""
    (scene.folder / "exit-1").write_text("66")
    scene.redis.lead(2)
    scene.want()
    scene.start_agent()
    until(lambda: scene.status().get("state") == "failed", 40.0)
    tries, why = len(scene.pids(1)), scene.status()["detail"]
    until(lambda: "without being ready" in json.dumps(scene.host.clients[-1].records), 40.0)
    scene.lose_agent()
    agent = scene.adopts()
    replica = agent.replicas.by_place[MODEL, REPLICA]
    until(lambda: not replica.processes, 40.0)
    assert replica.failed is not None and replica.failed in why and len(scene.pids(1)) == tries


def test_a_rank_that_hangs_since_before_the_agent_is_found(scene: Scene) -> None:
    """Which epoch it was last heard in is handed on: its silence counts for the next agent too, after a grace."""
    pids = scene.served()
    held = scene.redis.lead(2, owner=f"{HOST}/{pids[0]}")
    scene.redis.client.persist(scene.redis.keys.lock)
    for rank in (0, 1):
        scene.beat(rank, held.epoch, pids[rank])
    scene.heard(pids, held.epoch)
    scene.lose_agent()
    scene.redis.client.delete(scene.redis.keys.heartbeat(1))
    scene.adopts()
    poison = until(lambda: health.read_poison(scene.redis.client, MODEL, REPLICA), 40.0)
    assert (poison.epoch, poison.rank) == (held.epoch, 1) and "has not beaten" in poison.message
    until(lambda: len(scene.pids(1)) == 2, 40.0)


def test_ranks_of_another_version_end_when_one_of_them_must_be_replaced(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade old ranks serve on; a group is never of two versions, and its own end is no failure."""
    pids = scene.served()
    scene.lose_agent()
    monkeypatch.setattr(replica_module, "VERSION", "another")
    agent = scene.adopts()
    assert agent.replicas.by_place[MODEL, REPLICA].pids() == pids
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: len(scene.pids(0)) == len(scene.pids(1)) == 2, 40.0)
    assert agent.replicas.by_place[MODEL, REPLICA].attempts == 1


@pytest.mark.parametrize("ranks", [[0, 1], [1]], ids=["leader", "peer"])
def test_a_replica_whose_ranks_live_stays_on_a_host_without_an_agent(redis: ReplicaRedis, ranks: list[int]) -> None:
    """The lock that is renewed, or a rank's heartbeat, keeps its place; an unload is written down for the next agent;
    once the ranks are silent too, another host gets them."""
    spec = ModelSpec(name=MODEL, source="/nowhere", tp=2, devices=["cpu", "cpu"])
    catalog.put_spec(redis.client, spec)
    spec = catalog.get_spec(redis.client, MODEL) or spec
    assignment = Assignment(spec=spec, replica=REPLICA, ranks=ranks, devices=["cpu"] * len(ranks))
    membership.beat_host(redis.client, FarmHost("away"), 1, 1)
    membership.beat_host(redis.client, FarmHost("other"), 2, 1)
    farm.assign(redis.client, "away", assignment)
    redis.client.delete("furrow:host:away")
    redis.client.persist("furrow:host:other")
    held = redis.lead(2, owner=("away" if 0 in ranks else "other") + "/7")
    redis.client.persist(redis.keys.lock)
    word = health.Beat(
        epoch=held.epoch, seq=1, oldest_pending_ms=0, device="cpu", memory_bytes=1, phase="ready", pid=8, host="away"
    )
    redis.run(health.beat(MODEL, REPLICA, 1, word))
    redis.client.persist(redis.keys.heartbeat(1))
    planner = Planner(redis.client, lambda *_: None)
    planner.turn()
    assert farm.assignments(redis.client, "away") == [assignment]
    assert all(1 not in one.ranks for one in farm.assignments(redis.client, "other"))
    redis.client.delete(redis.keys.heartbeat(1))
    if 0 in ranks:  # the lock alone keeps it
        planner.turn()
        assert farm.assignments(redis.client, "away") == [assignment]
        catalog.tombstone(redis.client, MODEL)
        planner.turn()
        [withdrawn] = farm.assignments(redis.client, "away")
        assert withdrawn.withdrawn, "the next agent must end the ranks, not publish them again"
        redis.client.delete(redis.keys.lock)
        planner.turn()
        assert farm.assignments(redis.client, "away") == []
        return
    planner.turn()
    assert farm.assignments(redis.client, "away") == []
    planner.turn()
    assert any(1 in one.ranks for one in farm.assignments(redis.client, "other"))
