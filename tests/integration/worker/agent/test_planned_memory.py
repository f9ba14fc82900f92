"""A model starts only where its memory fits: with its share; what does not fit is reported with the figures."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from control.messages import Assignment, ModelSpec
from control.placement import farm, membership
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Host
from control.records import catalog
from control.replicas import health, model_overviews
from control.replicas.health import Beat
from control.replicas.model_overviews import ReplicaOverview, ReplicaState
from ops.demo import MODEL_DIR
from tests.integration.worker.agent.agent_scene import HOST, AgentScene
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.waiting import until
from worker.agent.needs import assets_of, need_apart
from worker.agent.planner import Planner
from worker.repository import source

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
    return need_apart(spec, MODEL_DIR)


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

    def refusal() -> str:
        """The reason; empty for a moment while what was assigned before its need was known is retired."""
        unplaceable = scene.status().get("state") == "unplaceable"
        [overview] = model_overviews.overviews(scene.redis.client)
        detail = overview.replicas[0].detail if overview.replicas else ""
        return detail if unplaceable and held(scene) == [] and "of memory" in detail else ""

    reason = until(refusal, 40.0)
    assert "of memory; host has 64 MiB left" in reason and "furrow models plan" in reason
    assert not scene.pids(0)


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
    [rank] = need.ranks
    assert assignment.kv_tokens == (GIB - rank.least) // (2 * rank.bytes_per_token)
    assert assignment.memory == need.bytes_with(assignment.kv_tokens)


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
    membership.beat_host(redis.client, Host("old"), 1, 1)
    membership.beat_host(redis.client, Host("new", memory=GIB), 1, 1)
    membership.beat_host(redis.client, Host("gpus", ("cuda:0",), memory=GIB, device_memory={"cuda:0": 8 * GIB}), 1, 1)
    living = {one.id: one for one in membership.living_hosts(redis.client)}
    assert {name: one.memory for name, one in living.items()} == {"gpus": GIB, "new": GIB, "old": None}
    assert [dict(living[name].device_memory) for name in ("gpus", "new")] == [{"cuda:0": 8 * GIB}, {}]
    redis.client.hset("furrow:needs", "odd", "{}")
    rank = RankNeed(weights=1, kv=0, step=0, process=0)
    redis.run(farm.put_need("m", ModelNeed(revision=1, context=8, ranks=[rank])))
    assert list(redis.run(farm.needs())) == ["m"]
    old = '{"spec":{"name":"m","source":"/m"},"replica":"r0","ranks":[0],"devices":["cpu"]}'
    redis.client.hset("furrow:host:old:assignments", "m r0", old)
    [assignment] = farm.assignments(redis.client, "old")
    assert (assignment.memory, assignment.kv_tokens) == ([], None)


def test_a_farm_that_plans_no_memory_looks_for_no_needs(redis: ReplicaRedis) -> None:
    membership.beat_host(redis.client, Host("one"), 1, 1)
    catalog.put_spec(redis.client, ModelSpec(name=MODEL, source=str(MODEL_DIR)))
    reports = list[str]()
    Planner(redis.client, lambda model, replica, why: reports.append(why)).turn()
    assert reports == []
    [assignment] = farm.assignments(redis.client, "one")
    assert assignment.memory == [] and redis.run(farm.needs()) == {}


def test_models_that_are_desired_together_share_a_host(redis: ReplicaRedis) -> None:
    """The first takes no KV memory that the second needs at least, whichever need is known first."""
    host = Host("one", memory=260 * 2**20)
    for name in ("a", "b"):
        catalog.put_spec(redis.client, ModelSpec(name=name, source=str(MODEL_DIR)))
    reports = list[str]()
    planner = Planner(redis.client, lambda model, replica, why: reports.append(why))

    def placed() -> bool:
        membership.beat_host(redis.client, host, 1, 1)
        planner.turn()
        return len(farm.assignments(redis.client, "one")) == 2

    until(placed, 40.0)
    assigned = [sum(one.memory) for one in farm.assignments(redis.client, "one")]
    assert reports == [] and all(assigned) and sum(assigned) <= 260 * 2**20


@pytest.fixture
def whole_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.agent.reconciliation.is_all", lambda memory: True)


def test_the_first_model_of_a_machine_does_not_wait_for_its_need(
    scene: AgentScene, whole_machine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(spec: ModelSpec, place: Path) -> ModelNeed:
        raise AssertionError("its need is looked for before it serves")

    monkeypatch.setattr("worker.agent.needs.need_apart", slow)
    want(scene)
    until(lambda: scene.pids(0), 40.0)
    [assignment] = held(scene)
    assert assignment.memory == [] and assignment.kv_tokens is None and scene.redis.run(farm.needs()) == {}


@pytest.mark.parametrize(("state", "counted"), [("loaded", 7000), ("loading", None), ("failed", 0)])
def test_what_was_started_before_its_need_was_known_is_counted_as_it_serves(
    redis: ReplicaRedis, monkeypatch: pytest.MonkeyPatch, state: ReplicaState, counted: int | None
) -> None:
    """With the KV tokens that its ranks took. Nothing is placed beside it before that."""
    host = Host("one", memory=GIB)
    membership.beat_host(redis.client, host, 1, 1)
    first = ModelSpec(name=MODEL, source=str(MODEL_DIR), revision=1)
    catalog.put_spec(redis.client, first)
    planner = Planner(redis.client, lambda model, replica, why: None)
    planner.turn()
    [assignment] = farm.assignments(redis.client, "one")
    assert assignment.memory == [] and redis.run(farm.needs()) == {}
    need = msgspec.structs.replace(need_apart(assignment.spec, MODEL_DIR), context=4096)
    redis.run(farm.put_need(MODEL, need))
    redis.run(catalog.put_assets(MODEL, msgspec.structs.replace(assets_of(first, MODEL_DIR), kv_tokens=7000)))
    beat = Beat(epoch=1, seq=0, oldest_pending_ms=0, device="cpu", memory_bytes=1, phase="ready", pid=1, host="one")
    looked_at = model_overviews.overview(redis.client, MODEL)
    replica = ReplicaOverview("r0", 1, state, "", "one", ["cpu"], 1, 0, [beat])
    looked_at = replace(looked_at, replicas=[replica])
    monkeypatch.setattr(model_overviews, "overview", lambda client, model: looked_at)
    catalog.put_spec(redis.client, ModelSpec(name="second", source=str(MODEL_DIR), kv_tokens=1024))
    expected = [MODEL] if counted is None else sorted([MODEL, "second"])
    for _ in range(20):
        membership.beat_host(redis.client, host, 1, 1)
        planner.turn()
        held = {one.spec.name: one for one in farm.assignments(redis.client, "one")}
        if counted is not None and sorted(held) == expected:
            break
        time.sleep(0.1)
    assert sorted(held) == expected
    if counted is None:
        assert held[MODEL].memory == []
    else:
        assert held[MODEL].memory == need.bytes_with(held[MODEL].kv_tokens or 0)
        assert state == "failed" or held[MODEL].kv_tokens == counted


def test_a_replica_to_which_nobody_assigns_memory_starts_all_the_same(
    scene: AgentScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an agent of an older version plans."""
    monkeypatch.setattr("control.placement.rollout._sized", lambda *arguments: [])
    monkeypatch.setattr("worker.agent.reconciliation.ASSIGN_PATIENCE_S", 0.5)
    want(scene)
    until(lambda: scene.pids(0), 40.0)
    [assignment] = held(scene)
    assert assignment.memory == [] and MODEL in scene.redis.run(farm.needs())


def test_a_later_model_gets_kv_memory_that_another_gives_back(redis: ReplicaRedis) -> None:
    """It is asked for first. Until the leader's heartbeat tells that it does with less, nothing is assigned; a
    replica that does not serve is not asked."""
    host = Host("one", memory=GIB, dedicated=True)
    reports = list[str]()
    planner = Planner(redis.client, lambda model, replica, why: reports.append(why))

    def turn() -> dict[str, Assignment]:
        membership.beat_host(redis.client, host, 1, 1)
        planner.turn()
        return {one.spec.name: one for one in farm.assignments(redis.client, "one")}

    def leader_tells(limit: int, used: int = 10) -> None:
        beat = Beat(epoch=1, seq=0, oldest_pending_ms=0, device="cpu", memory_bytes=1, phase="ready", pid=1, host="one")
        word = msgspec.structs.replace(beat, kv_used=used, kv_limit=limit)
        redis.client.set(redis.keys.epoch, 1)
        redis.run(health.beat(MODEL, "r0", 0, word))

    first = ModelSpec(name=MODEL, source=str(MODEL_DIR), max_context=4096)
    redis.run(farm.put_need(MODEL, msgspec.structs.replace(need_apart(first, MODEL_DIR), revision=1)))
    catalog.put_spec(redis.client, first)
    catalog.put_spec(redis.client, ModelSpec(name="none", source=str(MODEL_DIR), unload=True))  # not the only one
    share = until(lambda: turn().get(MODEL), 20.0).kv_tokens
    assert share is not None and share > 4096 and turn()[MODEL].memory[0] > GIB - 2**20
    catalog.put_spec(redis.client, ModelSpec(name="later", source=str(MODEL_DIR), max_context=4096))
    until(lambda: turn() and any("of memory" in why for why in reports), 20.0)
    assert turn()[MODEL].kv_target is None, "it does not serve"
    leader_tells(share)
    target = until(lambda: turn()[MODEL].kv_target, 5.0)
    assert 4096 <= target < share and "later" not in turn() and turn()[MODEL].kv_tokens == share
    status = redis.run(health.status_of("later", "r0"))
    assert status is not None and status.state == "starting" and f"{MODEL}:r0 gives back" in status.detail
    leader_tells(target + 1)
    assert "later" not in turn()
    leader_tells(target)
    held = until(lambda: (held := turn()) and "later" in held and held, 5.0)
    assert (held[MODEL].kv_tokens, held[MODEL].kv_target) == (target, None)
    assert sum(sum(one.memory) for one in held.values()) <= GIB


def test_ranks_get_uneven_shares_where_even_ones_fit_nowhere(redis: ReplicaRedis) -> None:
    """Their need is looked for then, and no figures are told meanwhile; a host with too little for a unit gets none."""
    reports = list[str]()
    planner = Planner(redis.client, lambda model, replica, why: reports.append(why))
    spec = ModelSpec(name=MODEL, source=str(MODEL_DIR), tp=2, kv_tokens=200_000)
    [even, _] = need_apart(spec, MODEL_DIR).ranks
    sizes = {"large": int(1.4 * even.total), "small": int(0.7 * even.total)}
    hosts = [Host(name, memory=size) for name, size in sizes.items()]
    catalog.put_spec(redis.client, spec)
    catalog.put_spec(redis.client, ModelSpec(name="none", source=str(MODEL_DIR), unload=True))  # not the only one

    def turn() -> dict[str, Assignment]:
        for host in hosts:
            membership.beat_host(redis.client, host, 1, 1)
        planner.turn()
        return {name: one for name in sizes for one in farm.assignments(redis.client, name)}

    held = until(lambda: (held := turn()) and len(held) == 2 and held, 30.0)
    assert reports == []
    assert {name: one.ranks for name, one in held.items()} == {"large": [0], "small": [1]}
    assert held["large"].shares == held["small"].shares == [3, 1]
    need = redis.run(farm.needs())[MODEL]
    for name, units in (("large", 3), ("small", 1)):
        assert held[name].memory == [need.unit_ranks[units - 1].total] and held[name].memory[0] <= sizes[name]
