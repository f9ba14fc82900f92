"""Hosts that plan their memory: what fits is started with its share, and what does not is reported with the figures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from control.messages import Assignment, ModelSpec
from control.placement import farm
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Host
from control.records import catalog
from control.replicas import health
from ops.demo import MODEL_DIR
from tests.integration.worker.agent.agent_scene import HOST, AgentScene
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.waiting import until
from worker.agent.needs import need_of
from worker.agent.planner import Planner
from worker.repository import source, validation

GIB = 2**30


@pytest.fixture
def memory() -> int:
    return GIB


@pytest.fixture
def model() -> Path:
    """The demonstration model, whose headers tell what it needs."""
    return MODEL_DIR


def want(scene: AgentScene, **changes: object) -> ModelSpec:
    return scene.want(**({"tp": 1, "devices": []} | changes))


def the_need(spec: ModelSpec) -> ModelNeed:
    return need_of(spec, validation.inspect(MODEL_DIR))


def no_files(name: str, gguf: str | None = None) -> None:
    """As `on_this_host` for a model that is still to be downloaded."""


def held(scene: AgentScene) -> list[Assignment]:
    return farm.assignments(scene.redis.client, HOST)


def test_a_model_is_started_with_its_share(scene: AgentScene) -> None:
    """Half of what the host has left beside its weights is KV memory; the rank is told so."""
    spec = want(scene)
    until(lambda: scene.pids(0), 40.0)
    [assignment] = held(scene)
    [rank] = the_need(spec).ranks
    tokens = (GIB - rank.least) // (2 * rank.bytes_per_token)
    assert assignment.kv_tokens == tokens
    assert assignment.memory == [rank.least + tokens * rank.bytes_per_token]
    process = scene.process(0)
    duty = Path(f"/proc/{process.pid}/environ").read_text().partition("FURROW_ASSIGNMENT=")[2].partition("\0")[0]
    assert msgspec.json.decode(duty, type=Assignment).spec.kv_tokens == assignment.kv_tokens


def test_named_kv_tokens_stay(scene: AgentScene) -> None:
    want(scene, kv_tokens=5000)
    until(lambda: scene.pids(0), 40.0)
    [assignment] = held(scene)
    assert assignment.kv_tokens is None and assignment.memory == [the_need(assignment.spec).ranks[0].total]


@pytest.mark.parametrize("memory", [64 * 2**20])
def test_a_model_that_fits_nowhere_is_not_started(scene: AgentScene) -> None:
    want(scene)
    until(lambda: scene.status().get("state") == "unplaceable", 40.0)
    assert held(scene) == [] and not scene.pids(0)
    [overview] = health.overviews(scene.redis.client)
    [replica] = overview.replicas
    assert "of memory; host has 64 MiB left" in replica.detail and "furrow models plan" in replica.detail


def test_a_need_that_is_known_after_the_download_is_told_before_a_start(
    scene: AgentScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner finds no files, as on another host; it places the model all the same, and assigns its memory when the
    host of the replica knows it."""
    monkeypatch.setattr(source, "on_this_host", no_files)
    spec = want(scene)
    until(lambda: scene.pids(0), 40.0)
    [assignment] = held(scene)
    need = the_need(spec)
    assert assignment.memory == need.bytes_with(need.least_tokens) and assignment.kv_tokens == need.least_tokens


@pytest.mark.parametrize("memory", [64 * 2**20])
def test_what_does_not_fit_after_the_download_is_taken_back(scene: AgentScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "on_this_host", no_files)
    want(scene)
    until(lambda: scene.status().get("state") == "unplaceable", 40.0)
    assert held(scene) == [] and not scene.pids(0)


def test_an_unload_forgets_the_need(scene: AgentScene) -> None:
    want(scene)
    until(lambda: scene.pids(0), 40.0)
    assert MODEL in scene.redis.run(farm.needs())
    assert catalog.tombstone(scene.redis.client, MODEL)
    until(lambda: catalog.get_spec(scene.redis.client, MODEL) is None, 40.0)
    assert scene.redis.run(farm.needs()) == {}


def test_records_of_an_older_version_are_read(redis: ReplicaRedis) -> None:
    """A heartbeat without memory, an assignment without bytes; and a need of another form is left out."""
    farm.beat_host(redis.client, Host("old"), 1, 1)
    farm.beat_host(redis.client, Host("new", memory=GIB), 1, 1)
    assert [(one.id, one.memory) for one in farm.living_hosts(redis.client)] == [("new", GIB), ("old", None)]
    redis.client.hset("furrow:needs", "odd", "{}")
    rank = RankNeed(weights=1, kv=0, step=0, process=0)
    redis.run(farm.put_need("m", ModelNeed(revision=1, context=8, ranks=[rank])))
    assert list(redis.run(farm.needs())) == ["m"]
    old = '{"spec":{"name":"m","source":"/m"},"replica":"r0","ranks":[0],"devices":["cpu"]}'
    redis.client.hset("furrow:host:old:assignments", "m r0", old)
    [assignment] = farm.assignments(redis.client, "old")
    assert (assignment.memory, assignment.kv_tokens) == ([], None)


def test_a_farm_that_plans_no_memory_looks_for_no_needs(redis: ReplicaRedis) -> None:
    farm.beat_host(redis.client, Host("one"), 1, 1)
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source=str(MODEL_DIR)))
    reports = list[str]()
    Planner(redis.client, lambda model, replica, why: reports.append(why)).turn()
    assert reports == []
    [assignment] = farm.assignments(redis.client, "one")
    assert assignment.memory == [] and redis.run(farm.needs()) == {}


def test_models_that_are_desired_together_share_a_host(redis: ReplicaRedis) -> None:
    """The first takes no KV memory that the second needs at least, whichever need is known first."""
    host = Host("one", memory=200 * 2**20)
    for name in ("a", "b"):
        catalog.put_spec(redis.client, ModelSpec(name=name, source=str(MODEL_DIR)))
    reports = list[str]()
    planner = Planner(redis.client, lambda model, replica, why: reports.append(why))

    def placed() -> bool:
        farm.beat_host(redis.client, host, 1, 1)
        planner.turn()
        return len(farm.assignments(redis.client, "one")) == 2

    until(placed, 40.0)
    assigned = [sum(one.memory) for one in farm.assignments(redis.client, "one")]
    assert reports == [] and all(assigned) and sum(assigned) <= 200 * 2**20
