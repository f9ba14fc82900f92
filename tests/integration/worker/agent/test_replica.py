"""A replica has one process per rank: each on its own device, watched, started again, stopped in order."""

from __future__ import annotations

import queue
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from control.messages import Assignment, ModelSpec
from tests.supervisor import supervised
from tests.waiting import until
from worker.agent import replica as replica_module
from worker.agent.replica import PAUSES_S, ReplicaProcesses
from worker.agent.supervision.client import SupervisorClient
from worker.rank.exit_codes import describe

PATIENT = """#!/bin/sh
# In the place of python: notes what it was given, notes that it is told to stop, and does so unless it is stubborn.
trap 'echo "$FURROW_RANK" >> {folder}/terminated; [ -e {folder}/stubborn ] || exit 0' TERM
echo "$FURROW_RANK $FURROW_DEVICE $FURROW_FOLDER $FURROW_HOST_ID $OMP_WAIT_POLICY" >> {folder}/started
while :; do sleep 0.02; done
"""


class Scene:
    """A replica whose rank processes are a shell script; its exits as they are reported."""

    def __init__(self, folder: Path, supervisor: SupervisorClient) -> None:
        self.folder = folder
        assignment = Assignment(
            spec=ModelSpec(name="m", source="/models/m", tp=2),
            replica="r0",
            ranks=[0, 1],
            devices=["cuda:4", "cuda:5"],
        )
        self.exits: queue.SimpleQueue[replica_module.Exit] = queue.SimpleQueue()
        self.replica = ReplicaProcesses(assignment, "/models/m", "host", "redis://nowhere", supervisor, self.exits)

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return sorted(path.read_text().splitlines()) if path.exists() else []

    def start(self) -> None:
        self.replica.spawn_missing()
        until(lambda: len(self.lines("started")) >= 2, 40.0)

    def reap(self) -> replica_module.Exit:
        """The next exit, taken note of as the agent does."""
        exit = self.exits.get(timeout=40.0)
        assert self.replica.ended(exit)
        return exit


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    script = tmp_path / "python"
    script.write_text(PATIENT.format(folder=tmp_path))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with supervised() as supervisor:
        yield Scene(tmp_path, supervisor)


def test_a_rank_is_started_with_the_kv_memory_that_is_left_to_it(scene: Scene) -> None:
    """With what the replica was asked to do with, also before its leader does."""
    replica = scene.replica
    for fields, tokens in (({}, None), ({"kv_tokens": 5000}, 5000), ({"kv_tokens": 5000, "kv_target": 3000}, 3000)):
        replica.assignment = msgspec.structs.replace(replica.assignment, **fields)
        duty = replica._duty(0, "cpu")["FURROW_ASSIGNMENT"]
        assert msgspec.json.decode(duty, type=Assignment).spec.kv_tokens == tokens


def test_each_rank_has_its_device_and_its_threads_do_not_spin(scene: Scene) -> None:
    """Rank i gets devices[i], the folder, and who its host is; a rank that runs is not started twice."""
    scene.start()
    scene.replica.spawn_missing()
    assert scene.lines("started") == ["0 cuda:4 /models/m host passive", "1 cuda:5 /models/m host passive"]


def test_an_exit_is_reported_with_its_status_and_only_that_rank_starts_again(scene: Scene) -> None:
    """A killed rank is named with its signal; its neighbour keeps its process and with it the weights."""
    scene.start()
    before = scene.replica.pids()
    scene.replica.kill(1)
    exit = scene.reap()
    assert (exit.rank, exit.pid, describe(exit.status)) == (1, before[1], "killed by SIGKILL")
    assert not scene.replica.ended(exit), "an exit counts once"
    scene.replica.spawn_missing()
    after = scene.replica.pids()
    assert after[0] == before[0] and after[1] != before[1]


def test_pauses_grow_and_then_the_tries_are_used_up(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off, then failed; a group that was ready in between starts from nothing again."""
    monkeypatch.setattr(replica_module.time, "monotonic", lambda: 100.0)
    dues = []
    while scene.replica.pause():
        dues.append(scene.replica.due - 100.0)
    assert dues == list(PAUSES_S) == sorted(dues)
    scene.replica.ready()
    assert scene.replica.pause()


def test_nothing_is_started_during_a_pause_or_after_giving_up(scene: Scene) -> None:
    """The pause is kept, and a replica that failed stays down."""
    scene.replica.pause()
    scene.replica.pause()
    scene.replica.spawn_missing()
    assert scene.replica.pids() == {}
    scene.replica.due = 0.0
    scene.replica.failed = "no memory"
    scene.replica.spawn_missing()
    assert scene.replica.pids() == {}


def test_a_stop_asks_the_leader_first_and_then_the_others(scene: Scene) -> None:
    """The leader drains or gives back and tells its ranks; who is left once it has gone is asked directly."""
    scene.start()
    scene.replica.stop()
    scene.replica.press()
    assert scene.reap().rank == 0
    assert scene.lines("terminated") == ["0"]
    scene.replica.press()
    exit = scene.reap()
    assert (exit.rank, exit.status) == (1, 0)
    scene.replica.spawn_missing()
    assert scene.replica.pids() == {}


def test_ranks_whose_leader_is_elsewhere_end_at_once_when_their_host_leaves(scene: Scene) -> None:
    """Its leader goes on and would drive them for ever; an unload instead asks them, and the leader drains."""
    scene.replica.assignment = msgspec.structs.replace(scene.replica.assignment, ranks=[1, 2])
    scene.start()
    (scene.folder / "stubborn").touch()
    scene.replica.stop(host_leaves=True)
    assert [describe(scene.reap().status) for _ in range(2)] == ["killed by SIGKILL"] * 2
    assert scene.lines("terminated") == []


def test_who_does_not_stop_in_time_is_killed(scene: Scene) -> None:
    """A stop has an end, whatever a rank does with the signal."""
    (scene.folder / "stubborn").touch()
    scene.start()
    scene.replica.stop()
    until(lambda: scene.lines("terminated") == ["0"], 40.0)
    scene.replica.stop_by = 0.0
    scene.replica.press()
    assert {scene.reap().rank, scene.reap().rank} == {0, 1}


def test_a_host_that_does_not_offer_the_engine_gives_its_replica_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker was started again without the option: nothing is tried for ever, and the remedy is named."""
    monkeypatch.setenv("PATH", str(scene.folder))
    spec = msgspec.structs.replace(scene.replica.assignment.spec, engine="vllm")
    scene.replica.assignment = msgspec.structs.replace(scene.replica.assignment, spec=spec)
    scene.replica.spawn_missing()
    assert scene.replica.failed is not None and "--engine-python vllm=" in scene.replica.failed
    assert scene.replica.processes == {}
