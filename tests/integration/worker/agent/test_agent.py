"""The agent carries out assignments: a whole agent on a real server, with a script in the place of rank processes;
exits, giving up."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import psutil
import pytest

from control import keys, requests
from control.errors import FurrowError
from control.keys import ModelKeys
from control.messages import Assignment, GenerationRequest, ModelSpec, Sampling
from control.operations import desired
from control.placement import farm, membership
from control.placement.placement import Host
from control.records import catalog
from control.replicas import health, lease, model_overviews
from control.requests import Enqueue
from tests.integration.worker.agent.agent_scene import HOST, AgentScene
from tests.integration.worker.conftest import MODEL, REPLICA
from tests.waiting import until
from worker.agent import agent as agent_module
from worker.agent.agent import Agent
from worker.agent.rank_exits import OUT_OF_MEMORY, MemoryKills
from worker.agent.replica import ReplicaProcesses
from worker.rank.exit_codes import LOAD_FAILED, REFUSED
from worker.repository.preparation import check


def test_a_desired_model_runs_and_an_unload_takes_it_away(scene: AgentScene) -> None:
    """Desired state becomes processes, one per rank; its tombstone ends them and leaves nothing behind."""
    scene.want()
    until(lambda: scene.pids(0) and scene.pids(1), 40.0)
    until(lambda: scene.status().get("state") == "running", 40.0)
    assert catalog.tombstone(scene.redis.client, MODEL)
    until(lambda: catalog.get_spec(scene.redis.client, MODEL) is None, 40.0)
    assert scene.status() == {} and farm.assignments(scene.redis.client, HOST) == []


def beats_ready(scene: AgentScene, epoch: int, pid: int) -> None:
    """The leader's word that its group serves, heard until it is unheard."""
    word = health.Beat(
        epoch=epoch, seq=1, oldest_pending_ms=0, device="cpu", memory_bytes=1, phase="ready", pid=pid, host=HOST
    )
    scene.redis.run(health.beat(MODEL, REPLICA, 0, word))
    scene.redis.client.persist(scene.redis.keys.heartbeat(0))


def test_a_standby_is_kept_while_there_is_a_model_and_not_much_longer(
    scene: AgentScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts at once, and is there once; ranks wait for its imports, not for ever; it ends after the last model."""
    monkeypatch.setattr(agent_module, "IDLE_S", 0.0)
    (scene.folder / "standby").touch()
    scene.want()
    [standby] = until(lambda: scene.pids("standby"), 40.0)
    until(lambda: scene.agent.replicas.by_place, 40.0)
    assert not scene.pids(0) and scene.agent._standby is not None
    scene.agent._standby._await_by = 0.0
    until(lambda: scene.pids(1), 40.0)
    assert scene.standby() == "starting"
    scene.process(1).kill()
    until(lambda: len(scene.pids(1)) == 2, 40.0)
    assert scene.pids("standby") == [standby], "no second one was started"
    catalog.tombstone(scene.redis.client, MODEL)
    until(lambda: scene.standby() == "off", 40.0)
    assert not psutil.pid_exists(standby)


def test_an_agent_whose_replicas_serve_looks_less_often(scene: AgentScene) -> None:
    """Twice as long lies between two ticks, until something changes: here a rank's end, which is noticed at once."""
    assert scene.agent.tick_s == agent_module.TICK_S
    scene.want()
    [pid] = until(lambda: scene.pids(0), 40.0)
    held = scene.redis.lead(2, owner=f"{HOST}/{pid}")
    scene.redis.client.persist(scene.redis.keys.lock)
    assert scene.agent.tick_s == agent_module.TICK_S
    beats_ready(scene, held.epoch, pid)
    until(lambda: scene.agent.tick_s == agent_module.STEADY_TICK_S, 40.0)
    scene.redis.client.delete(scene.redis.keys.heartbeat(0))
    scene.process(1).kill()
    until(lambda: scene.agent.tick_s == agent_module.TICK_S, 40.0)


def test_a_dead_leader_s_epoch_is_poisoned_and_its_lock_is_free_at_once(scene: AgentScene) -> None:
    """The lock is freed at once; the poison names rank, pid and signal, and the rank is started again."""
    scene.want()
    [pid] = until(lambda: scene.pids(0), 40.0)
    held = scene.redis.lead(2, owner=f"{HOST}/{pid}")
    scene.redis.client.persist(scene.redis.keys.lock)
    scene.process(0).kill()
    poison = until(lambda: health.read_poison(scene.redis.client, MODEL, REPLICA), 40.0)
    assert (poison.epoch, poison.rank, poison.kind) == (held.epoch, 0, "exited")
    assert f"rank 0 (pid {pid}) killed by SIGKILL" in poison.message
    until(lambda: scene.redis.run(lease.holder(MODEL, REPLICA)) is None, 40.0)
    until(lambda: len(scene.pids(0)) == 2, 40.0)
    assert len(scene.pids(1)) == 1, "its neighbour keeps its process"


def test_a_kill_for_lack_of_memory_is_named(scene: AgentScene, tmp_path: Path) -> None:
    """In the cause that lists and console show, where the count of the control group rose; with the remedy."""
    (tmp_path / "own").write_text("0::/\n")
    (count := tmp_path / "memory.events").write_text("oom 2\noom_kill 2\n")
    scene.agent._exits._kills = MemoryKills(tmp_path, tmp_path / "own")
    scene.redis.lead(2)
    scene.want()
    [pid] = until(lambda: scene.pids(1), 40.0)
    count.write_text("oom 3\noom_kill 3\n")
    scene.process(1).kill()
    poison = until(lambda: health.read_poison(scene.redis.client, MODEL, REPLICA), 40.0)
    assert poison.message == f"rank 1 (pid {pid}) killed by SIGKILL: {OUT_OF_MEMORY}" and "--kv-tokens" in OUT_OF_MEMORY
    until(lambda: "lack of memory" in model_overviews.overview(scene.redis.client, MODEL).detail, 40.0)


def test_another_leader_s_lock_is_left_alone(scene: AgentScene) -> None:
    """An exit that is reported late frees nothing that a newer leader holds."""
    scene.want()
    until(lambda: scene.pids(0), 40.0)
    scene.redis.lead(2, owner="elsewhere/7")
    scene.redis.client.persist(scene.redis.keys.lock)
    scene.process(0).kill()
    until(lambda: len(scene.pids(0)) == 2, 40.0)
    assert scene.redis.run(lease.holder(MODEL, REPLICA)) is not None


def test_a_rank_that_keeps_failing_is_given_up_with_its_last_cause(scene: AgentScene) -> None:
    """After the last pause the replica is failed, its other ranks end, and the status says why."""
    scene.exits(1, LOAD_FAILED)
    scene.redis.lead(2)
    scene.want()
    until(lambda: scene.status().get("state") == "failed", 40.0)
    detail = scene.status()["detail"]
    assert "rank 1" in detail and "could not load" in detail and "3 times" in detail
    assert len(scene.pids(1)) == 4
    until(lambda: not scene.agent.replicas.by_place[MODEL, REPLICA].processes, 40.0)
    assert model_overviews.overview(scene.redis.client, MODEL).state == "failed"


def test_the_cause_is_the_first_error_and_not_the_kill_that_followed(scene: AgentScene) -> None:
    """Rank 0 says why it can't load; rank 1, and a poison of the same epoch that was there before, hide nothing."""
    held = scene.redis.lead(2)
    words = "Model folder '/models/gone' does not exist"
    health.write_poison(scene.redis.client, MODEL, REPLICA, held.epoch, 1, "exited", "rank 1 killed by SIGKILL")
    scene.want()
    [pid] = until(lambda: scene.pids(0), 40.0)
    until(lambda: scene.pids(1), 40.0)
    scene.says(0, pid, words)
    scene.exits(0, LOAD_FAILED)
    until(lambda: scene.status().get("state") in ("running", "backoff") and words in scene.status()["detail"], 40.0)
    scene.process(1).kill()
    until(lambda: scene.status().get("state") == "failed", 40.0)
    detail = model_overviews.overview(scene.redis.client, MODEL).detail
    assert words in detail and "SIGKILL" not in detail


def test_requests_of_a_replica_that_was_given_up_end_with_its_cause(scene: AgentScene) -> None:
    """Within 5 s, running and waiting ones; a dead leader's lock is freed. The model loaded again runs again."""
    words = "Model folder '/models/gone' does not exist"
    scene.want()
    [pid] = until(lambda: scene.pids(0), 40.0)
    held = scene.redis.lead(2, owner=f"{HOST}/{pid}")
    scene.redis.client.persist(scene.redis.keys.lock)
    for rid in ("running", "waiting"):
        params = GenerationRequest(prompt=[1, 2], sampling=Sampling(max_tokens=9))
        scene.redis.run(requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant="t")))
        if rid == "running":
            scene.redis.run(requests.claim(held, 1, 100))
    scene.says(0, pid, words)
    scene.exits(0, REFUSED)
    until(lambda: scene.status().get("state") == "failed", 40.0)
    given_up = time.monotonic()
    followed = [requests.follow(MODEL, rid, "", "t", 0) for rid in ("running", "waiting")]
    until(lambda: all(scene.redis.run(one).entries for one in followed), 40.0)
    assert time.monotonic() - given_up < 5.0
    for one in followed:
        [entry] = scene.redis.run(one).entries
        assert entry.finish == "unavailable" and words in (entry.cause or "")
    (scene.folder / "exit-0").unlink()
    desired.load(scene.redis.client, scene.spec, None)
    until(lambda: len(scene.pids(0)) == 2, 40.0)
    until(lambda: model_overviews.overview(scene.redis.client, MODEL).state in ("loading", "recovering"), 40.0)


def test_a_redis_that_lost_everything_is_told_again_what_was_given_up(scene: AgentScene) -> None:
    """Requests would wait without an end for a replica of which nothing is known."""
    scene.exits(0, REFUSED)
    scene.want()
    until(lambda: scene.status().get("state") == "failed", 40.0)
    scene.redis.client.flushall()
    until(lambda: scene.status().get("state") == "failed", 40.0)


def test_a_part_of_a_replica_follows_the_host_that_gave_it_up(scene: AgentScene) -> None:
    """Ranks of other hosts end with it, so that no leader holds its requests; another host's try starts them again."""
    spec = ModelSpec(name=MODEL, source=str(scene.model), tp=2, devices=["cpu", "cpu"], spread=True)
    catalog.put_spec(scene.redis.client, spec)
    spec = msgspec.structs.replace(spec, revision=1)
    for host, rank in ((HOST, 0), ("other", 1)):
        membership.beat_host(scene.redis.client, Host(host), 1, 1)
        part = Assignment(spec=spec, replica=REPLICA, ranks=[rank], devices=["cpu"])
        farm.assign(scene.redis.client, host, part)
    scene.redis.client.persist(keys.host("other"))
    scene.thread.start()
    until(lambda: scene.pids(0), 40.0)
    scene.process(0)  # the agent holds it a moment after the process has written its pid
    health.write_status(scene.redis.client, MODEL, REPLICA, "failed", "no such device", host="other")
    until(lambda: not scene.agent.replicas.by_place[MODEL, REPLICA].processes, 40.0)
    assert scene.status()["detail"] == "no such device" and len(scene.pids(0)) == 1
    health.write_status(scene.redis.client, MODEL, REPLICA, "starting", "", host="third")
    until(lambda: len(scene.pids(0)) == 2, 40.0)


def test_a_refusal_is_not_tried_again_until_the_model_is_wanted_otherwise(scene: AgentScene) -> None:
    """A refused assignment fails at once, in the rank's own words; a new revision is tried again."""
    words = "device cuda:9 was asked for, but torch sees 0 GPUs"
    scene.want()
    [pid] = until(lambda: scene.pids(0), 40.0)
    scene.says(0, pid, words)
    scene.exits(0, REFUSED)
    until(lambda: scene.status().get("state") == "failed", 40.0)
    assert scene.status()["detail"] == words and len(scene.pids(0)) == 1
    (scene.folder / "exit-0").unlink()
    scene.want(max_context=32)
    until(lambda: len(scene.pids(0)) == 2, 40.0)
    until(lambda: [one.revision for one in model_overviews.overview(scene.redis.client, MODEL).replicas] == [2], 40.0)


@pytest.mark.parametrize(
    ("config", "says"),
    [('{"model_type": "perceptron"}', "perceptron"), ("{not json", "not valid JSON"), ("{}", "model_type")],
)
def test_a_model_that_fails_a_gate_never_spawns_a_process(scene: AgentScene, config: str, says: str) -> None:
    """The gates come first: the status has their words, and no rank was started."""
    (scene.model / "config.json").write_text(config)
    scene.want()
    until(lambda: scene.status().get("state") == "failed", 40.0)
    assert says in scene.status()["detail"]
    assert scene.pids(0) == scene.pids(1) == []


def test_heads_that_do_not_divide_are_refused_before_any_process(scene: AgentScene) -> None:
    """The configuration alone shows if a model can be sharded."""
    scene.want(tp=3, devices=["cpu"] * 3)
    until(lambda: scene.status().get("state") == "failed", 40.0)
    assert "2 attention heads" in scene.status()["detail"] and scene.pids(0) == []


def test_a_redis_that_lost_everything_is_told_again_what_runs(scene: AgentScene) -> None:
    """Absence never means unload: the processes go on, and specification and assignment come back."""
    spec = scene.want()
    until(lambda: scene.pids(0) and scene.pids(1), 40.0)
    scene.redis.client.flushall()
    until(lambda: catalog.get_spec(scene.redis.client, MODEL), 40.0)
    until(lambda: farm.assignments(scene.redis.client, HOST), 40.0)
    assert catalog.get_spec(scene.redis.client, MODEL) == spec
    assert len(scene.pids(0)) == len(scene.pids(1)) == 1


@pytest.mark.parametrize("gone", [ModelKeys(MODEL).spec, keys.MODELS])
def test_a_redis_that_lost_the_specification_alone_is_told_again(scene: AgentScene, gone: str) -> None:
    """As by eviction or by hand: the assignment is there, and the model is loaded nowhere else. An unload stays one."""
    spec = scene.want()
    until(lambda: scene.pids(0) and scene.pids(1), 40.0)
    scene.redis.client.delete(gone)
    until(lambda: catalog.list_specs(scene.redis.client) == [spec], 40.0)
    assert len(scene.pids(0)) == len(scene.pids(1)) == 1
    desired.unload(scene.redis.client, MODEL)
    until(lambda: not scene.redis.client.exists(ModelKeys(MODEL).spec), 40.0)
    until(lambda: not scene.agent.places(), 40.0)
    assert catalog.list_specs(scene.redis.client) == []


def test_a_stopped_agent_leaves_no_process(scene: AgentScene) -> None:
    """Its ranks are asked to stop, reaped, and gone before it returns."""
    scene.want()
    until(lambda: scene.pids(0) and scene.pids(1), 40.0)
    processes = [scene.process(rank) for rank in (0, 1)]
    scene.stop()
    assert [process.poll() for process in processes] == [0, 0]


def test_a_stop_does_not_wait_for_the_next_tick(scene: AgentScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "TICK_S", 20.0)
    scene.thread.start()
    until(lambda: scene.redis.client.exists(keys.host(HOST)), 40.0)
    until(lambda: time.monotonic() - scene.agent.turned_at > 0.3, 40.0)  # it waits
    began = time.monotonic()
    scene.stop()
    assert time.monotonic() - began < 10.0


def test_check_names_what_is_wrong_with_a_source(tmp_path: Path) -> None:
    """The gates' errors are Furrow's own, fit for an operator."""
    spec = ModelSpec(name=MODEL, source=str(tmp_path / "gone"))
    with pytest.raises(FurrowError, match="does not exist"):
        check(Assignment(spec=spec, replica=REPLICA, ranks=[0], devices=["cpu"]))


def replica_of(scene: AgentScene, model: str) -> ReplicaProcesses:
    """The only replica of a model here."""
    [replica] = [one for (name, _), one in scene.agent.replicas.by_place.items() if name == model]
    return replica


class Killer:
    """The kernel's memory killer: it kills a rank, and counts it in a file of a control group."""

    def __init__(self, scene: AgentScene, folder: Path) -> None:
        (folder / "own").write_text("0::/\n")
        self._scene, self._folder, self._kills = scene, folder, 0
        self._count = folder / "memory.events"
        self._count.write_text("oom_kill 0\n")
        self.watch(scene.agent)

    def watch(self, agent: Agent) -> None:
        before = agent._supervisor.records.get("memory kills")
        agent._exits._kills = MemoryKills(self._folder, self._folder / "own", unclaimed_from=before)

    def strike(self, model: str) -> None:
        """Kill the rank of a model, and wait until another process is in its place, or the model was given up."""
        replica = replica_of(self._scene, model)
        process = until(lambda: replica.processes.get(0), 40.0)
        self._kills += 1
        self._count.write_text(f"oom_kill {self._kills}\n")
        process.kill()
        until(lambda: replica.failed or replica.processes.get(0) not in (None, process), 40.0)


def load(scene: AgentScene, name: str) -> None:
    """Make a model of one rank the desired state, and let the agent run."""
    catalog.put_spec(scene.redis.client, ModelSpec(name=name, source=str(scene.model), devices=["cpu"]))
    if not scene.thread.is_alive():
        scene.thread.start()


def want_two(scene: AgentScene) -> None:
    """Models a and b of one rank each; b is loaded after a runs here."""
    for name in ("a", "b"):
        load(scene, name)
        until(lambda name=name: (name, REPLICA) in scene.agent.replicas.by_place, 40.0)
        until(lambda name=name: replica_of(scene, name).loaded_ms, 40.0)


def forgiven(scene: AgentScene) -> None:
    """Both serve for a moment, as after each death where two do not fit."""
    for replica in list(scene.agent.replicas.by_place.values()):
        replica.ready()


def test_models_that_kill_each_other_for_memory(
    scene: AgentScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the third death the one that was loaded last is failed with the figures, though each served between two; the
    other serves on, with all its tries. Loaded again, it has three of its own."""
    monkeypatch.setattr("control.replicas.memory_deaths.TOGETHER_MS", 0)
    killer = Killer(scene, tmp_path)
    want_two(scene)
    for victim in ("a", "b", "a"):
        assert replica_of(scene, "b").failed is None
        killer.strike(victim)
        forgiven(scene)
    older, younger = (replica_of(scene, name) for name in ("a", "b"))
    assert until(lambda: younger.failed, 40.0) and older.failed is None and older.attempts == 0
    status = scene.redis.run(health.status_of("b", REPLICA))
    assert status is not None and status.state == "failed"
    for part in ("lack of memory on host", "3 times", "b (r0, 1 rank)", "beside it a (r0, 1 rank)", "the host has"):
        assert part in status.detail
    until(lambda: not younger.processes and older.processes, 40.0)
    desired.reload(scene.redis.client, "b")
    until(lambda: [one for one in scene.agent.replicas.by_place if one[0] == "b"] == [("b", "r1")], 40.0)
    again = replica_of(scene, "b")
    until(lambda: again.loaded_ms > younger.loaded_ms and again.processes, 40.0)
    for victim in ("b", "a"):
        killer.strike(victim)
        forgiven(scene)
    assert again.failed is None and older.failed is None
    killer.strike("b")
    assert until(lambda: again.failed, 40.0) and older.failed is None


def test_without_the_count_they_kill_each_other_for_ever(
    scene: AgentScene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: each brief success forgives what was before."""
    monkeypatch.setattr("control.replicas.memory_deaths.DEATHS", 10**6)
    killer = Killer(scene, tmp_path)
    want_two(scene)
    for victim in "abababab":
        killer.strike(victim)
        forgiven(scene)
    assert [replica_of(scene, name).failed for name in ("a", "b")] == [None, None]
