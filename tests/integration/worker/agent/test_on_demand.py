"""Models on demand are woken and evicted: turn by turn of the agent that plans, on a real server. No rank is started,
and what an agent and a leader would say of one is written by the tests."""

from __future__ import annotations

import time
from typing import Any

import pytest

from control import keys, requests
from control.keys import ModelKeys
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.placement import demand as demand_module
from control.placement import farm, membership
from control.placement import farm as farm_view_module
from control.placement.demand import Demand
from control.placement.placement import Host
from control.records import catalog
from control.redis import connection
from control.redis.connection import run
from control.replicas import health, model_overviews
from control.replicas.memory_deaths import server_ms
from control.requests import Enqueue
from ops.demo import MODEL_DIR
from tests.integration.worker.conftest import ReplicaRedis
from tests.waiting import until
from worker.agent import on_demand as on_demand_module
from worker.agent import planner as planner_module
from worker.agent.planner import Planner

MIB = 2**20
ONE_MODEL = 200 * MIB
"""Room for one replica of the demonstration model with the least KV memory, and not for two."""


class Scene:
    """One host that plans its memory, with models of which each could be a folder of its own."""

    def __init__(self, redis: ReplicaRedis, memory: int = ONE_MODEL) -> None:
        self.redis, self.memory = redis, memory
        self.planner = Planner(redis.another(), lambda *report: None)

    def want(self, *names: str, **fields: Any) -> None:
        for name in names:
            every: dict[str, Any] = {"source": str(MODEL_DIR), "min_replicas": 0} | fields
            catalog.put_spec(self.redis.client, ModelSpec(name=name, **every))

    def beat(self) -> None:
        membership.beat_host(self.redis.client, Host("h", memory=self.memory), 1, 1)

    def turn(self) -> None:
        """One turn of the agent, whose host beats; what was withdrawn has ended by the next one."""
        self.beat()
        self.planner.turn()
        for one in farm.assignments(self.redis.client, "h"):
            if one.withdrawn:
                farm.remove_assignment(self.redis.client, "h", one.spec.name, one.replica)

    def until(self, *held: str) -> None:
        """Turns until the host has a replica of just these models."""

        def turned() -> bool:
            self.turn()
            return self.held() == sorted(held)

        until(turned, 20.0)

    def held(self) -> list[str]:
        return sorted(one.spec.name for one in farm.assignments(self.redis.client, "h") if not one.withdrawn)

    def ask(self, model: str, rid: str, tenant: str = "t") -> None:
        params = GenerationRequest(prompt=[1], sampling=Sampling(max_tokens=1))
        self.redis.run(requests.enqueue(Enqueue(rid=rid, model=model, params=params, tenant=tenant)))

    def state(self, model: str, rid: str) -> str | None:
        return self.redis.client.hget(ModelKeys(model).request(rid), "state")

    def end(self, model: str, rid: str) -> None:
        """As a client that leaves."""
        self.redis.run(requests.cancel(model, rid, "t", "left"))

    def overview(self, model: str) -> model_overviews.Overview:
        return model_overviews.overview(self.redis.client, model)

    def demand(self, model: str) -> Demand:
        demand = self.redis.run(farm.demand_of(model))
        assert demand is not None
        return demand

    def note(self, model: str, **fields: Any) -> None:
        """As if the model had been seen so."""
        every: dict[str, Any] = {"replicas": 1, "revision": 1} | fields
        self.redis.run(farm.put_demand(model, Demand(**every)))

    def now(self) -> int:
        return run(self.redis.client, server_ms())


@pytest.fixture
def scene(redis: ReplicaRedis) -> Scene:
    return Scene(redis)


def sleeps(scene: Scene, *names: str) -> None:
    """Turns until these models are offered."""

    def offered() -> bool:
        scene.turn()
        return all(scene.overview(name).assets is not None for name in names)

    until(offered, 20.0)
    assert scene.held() == []


def test_a_model_sleeps_from_the_start_and_its_first_request_wakes_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API processes have its tokenizer before it was ever loaded. A request does not wait for the planner's rest."""
    monkeypatch.setattr(planner_module, "REST_S", 600.0)
    scene.want("a")
    sleeps(scene, "a")
    assert (scene.overview("a").state, scene.overview("a").wanted) == ("sleeping", 0)
    assert not scene.planner.tend(), "nothing is to be done"
    assert not scene.planner.tend() and scene.held() == []
    scene.ask("a", "r1")
    until(lambda: [scene.beat(), scene.planner.tend(), scene.held() == ["a"]][2], 20.0)
    assert (scene.overview("a").state, scene.overview("a").wanted) == ("loading", 1)


def test_one_whose_files_are_not_here_is_loaded_once(scene: Scene) -> None:
    """So it is downloaded, or the fault of its source is told."""
    scene.want("a", source="org/nowhere")
    scene.until("a")


def test_a_model_on_demand_sleeps_when_it_is_idle(scene: Scene) -> None:
    scene.want("a", idle_s=1)
    sleeps(scene, "a")
    scene.ask("a", "r1")
    scene.until("a")
    time.sleep(1.2)
    scene.turn()
    assert scene.held() == ["a"], "a request waits for it"
    scene.end("a", "r1")
    scene.until()
    assert scene.overview("a").state == "sleeping" and scene.overview("a").assets is not None


def test_models_take_turns_in_one_room(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is not in use gives way, once it has been loaded for a while; no other state is seen meanwhile than
    that the second is being loaded."""
    monkeypatch.setattr(demand_module, "LEAST_PAUSE_MS", 0)
    scene.want("a", "b")
    sleeps(scene, "a", "b")
    scene.ask("a", "r1")
    scene.until("a")
    scene.ask("b", "r2")
    waits = "waits for memory that other models use"
    until(lambda: [scene.turn(), scene.overview("b").detail == waits][1], 20.0)
    assert scene.held() == ["a"] and scene.overview("b").state == "sleeping", "the first is in use"
    scene.end("a", "r1")
    scene.note("a", loaded=scene.now() - 5_000, load_ms=1_000, used=scene.now() - 5_000)
    states = set[str]()

    def turned() -> bool:
        scene.turn()
        states.add(scene.overview("b").state)
        return scene.held() == ["b"]

    until(turned, 20.0)
    assert states <= {"sleeping", "loading"}
    assert scene.overview("a").state == "sleeping" and scene.state("b", "r2") == "queued"


def test_a_request_of_one_that_gave_way_waits_for_its_turn(scene: Scene) -> None:
    """Both have requests all the time: the first gives way late, and comes back as late."""
    scene.want("a", "b")
    sleeps(scene, "a", "b")
    scene.ask("a", "r1")
    scene.until("a")
    scene.ask("b", "r2")
    scene.turn()
    now, waited = scene.now(), demand_module.LONGEST_WAIT_MS
    scene.note("a", loaded=now - demand_module.STAY_MS, load_ms=500, used=now, requested=now)
    scene.note("b", replicas=0, waiting=now - waited // 2)
    scene.turn()
    assert scene.held() == ["a"]
    scene.note("b", replicas=0, waiting=now - waited)
    scene.until("b")
    assert scene.state("a", "r1") == scene.state("b", "r2") == "queued"
    scene.turn()
    assert scene.held() == ["b"] and scene.demand("a").waiting


def test_one_that_can_never_be_placed_ends_its_requests(scene: Scene) -> None:
    scene.memory = 64 * MIB
    scene.want("a")
    sleeps(scene, "a")
    scene.ask("a", "r1")
    until(lambda: [scene.turn(), scene.state("a", "r1") == "finished"][1], 20.0)
    request = scene.redis.client.hgetall(ModelKeys("a").request("r1"))
    assert "can't be placed" in str(request) and "MiB" in str(request)
    assert scene.held() == [] and scene.overview("a").state == "sleeping"


def test_a_model_that_fails_ends_its_requests_with_the_cause_and_is_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand_module, "FAILED_MS", 0)
    scene.want("a")
    sleeps(scene, "a")
    scene.ask("a", "r1")
    scene.until("a")
    health.write_status(scene.redis.client, "a", "r0", "failed", "its weights are damaged", host="h")
    began = time.monotonic()
    until(lambda: [scene.turn(), scene.state("a", "r1") == "finished"][1], 20.0)
    assert time.monotonic() - began < 5.0
    assert "its weights are damaged" in str(scene.redis.client.hgetall(ModelKeys("a").request("r1")))
    scene.until()
    scene.ask("a", "r2")
    scene.until("a")


def test_what_sleeps_survives_a_loss_of_redis(scene: Scene) -> None:
    """No host has it, so the agent that plans brings it back; one that was unloaded stays away."""
    scene.want("a", "gone")
    sleeps(scene, "a", "gone")
    catalog.tombstone(scene.redis.client, "gone")
    scene.turn()
    scene.turn()
    assert catalog.get_spec(scene.redis.client, "gone") is None
    scene.redis.client.flushall()
    sleeps(scene, "a")
    assert catalog.get_spec(scene.redis.client, "gone") is None
    scene.ask("a", "r1")
    scene.until("a")


def test_the_next_agent_goes_on(scene: Scene) -> None:
    """In the middle of a wake and of an eviction."""
    scene.want("a", "b")
    sleeps(scene, "a", "b")
    scene.ask("a", "r1")
    scene.until("a")
    scene.end("a", "r1")
    scene.ask("b", "r2")
    scene.note("a", loaded=scene.now() - 50_000, load_ms=500, used=scene.now() - 50_000)
    scene.beat()
    scene.planner.turn()  # the first is asked to leave
    scene.planner = Planner(scene.redis.another(), lambda *report: None)
    scene.until("b")
    scene.planner = Planner(scene.redis.another(), lambda *report: None)
    scene.turn()
    assert scene.held() == ["b"] and scene.demand("b").replicas == 1 and scene.demand("a").replicas == 0


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_tenant_has_its_share_of_the_others_room_and_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, taken_over: bool
) -> None:
    """Two tenants and four models: each may have two models give way for it in a minute, also where another agent
    plans by then."""
    monkeypatch.setattr(demand_module, "LEAST_PAUSE_MS", 0)
    names = ("a", "b", "c", "d")
    scene.want(*names)
    sleeps(scene, *names)
    scene.ask("a", "r0", tenant="other")
    scene.until("a")
    scene.redis.run(requests.cancel("a", "r0", "other", "left"))
    last = "a"
    for count, name in enumerate(("b", "c", "d")):
        scene.note(last, loaded=scene.now() - 50_000, load_ms=500, used=scene.now() - 50_000)
        scene.ask(name, f"r{name}", tenant="greedy")
        if count < 2:
            scene.until(name)
            scene.redis.run(requests.cancel(name, f"r{name}", "greedy", "left"))
            last = name
    if taken_over:
        scene.planner = Planner(scene.redis.another(), lambda *report: None)
        until(lambda: [scene.turn(), scene.overview("d").detail][1], 20.0)
    scene.turn()
    scene.turn()
    assert scene.held() == ["c"], "the third eviction of a minute is refused"
    scene.ask("b", "again", tenant="other")
    scene.until("b")


def test_a_changed_source_is_read_before_the_next_request(scene: Scene) -> None:
    """A prompt is tokenised with the tokenizer of the files that will answer it."""
    scene.want("a")
    sleeps(scene, "a")
    context = catalog.get_assets(scene.redis.client, "a")
    scene.want("a", max_context=512)
    assert context is not None and context.context_length != 512

    def read() -> bool:
        scene.turn()
        assets = catalog.get_assets(scene.redis.client, "a")
        return assets is not None and assets.context_length == 512

    until(read, 20.0)
    assert scene.held() == []


def counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls of each round trip from now on."""
    counts: list[int] = []
    original = connection.Posted.__init__

    def posted(self: Any, client: Any, calls: Any) -> None:
        counts.append(len(calls))
        original(self, client, calls)

    monkeypatch.setattr(connection.Posted, "__init__", posted)
    return counts


def test_models_that_sleep_cost_two_calls_each_a_turn(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is called, and its queue. Their specifications are not read again while none has changed."""
    names = [f"m{number}" for number in range(20)]
    scene.want(*names)
    sleeps(scene, *names)
    for _ in range(2):
        scene.turn()
    scene.beat()
    counts = counted(scene, monkeypatch)
    scene.planner.turn()
    assert sum(counts) < 3 * len(names)


def test_a_change_of_a_model_that_sleeps_is_seen_at_the_next_turn(scene: Scene) -> None:
    """Also of one that was unloaded and put anew, with the same revision."""
    scene.want("a", "b")
    sleeps(scene, "a", "b")
    for _ in range(2):
        scene.turn()
    assert scene.planner.on_demand.quiet == {"a", "b"}
    scene.want("a", min_replicas=1, replicas=2)
    scene.until("a")
    assert catalog.tombstone(scene.redis.client, "a") and catalog.tombstone(scene.redis.client, "b")
    until(lambda: [scene.turn(), catalog.get_spec(scene.redis.client, "b") is None][1], 20.0)
    scene.redis.client.delete(keys.MODELS_VERSION)  # as if nothing had changed since
    scene.want("b", min_replicas=None, source="org/nowhere")
    until(lambda: [scene.turn(), "b" in scene.held()][1], 20.0)
    [b] = [one for one in farm.assignments(scene.redis.client, "h") if one.spec.name == "b"]
    assert (b.spec.source, b.spec.revision) == ("org/nowhere", 1)


def test_what_another_agent_has_written_meanwhile_is_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that gets the placement lock back reads everything."""
    scene.want("a")
    sleeps(scene, "a")
    for _ in range(2):
        scene.turn()
    monkeypatch.setattr(farm_view_module, "FRESH_S", 0.0)
    monkeypatch.setattr(on_demand_module, "FRESH_S", 0.0)
    scene.note("a", replicas=1, used=scene.now(), changed=scene.now())
    scene.until("a")
