"""The console marks wrong facts about hosts and Redis: with the remedy, and every name is text."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from control import keys
from control.messages import Assignment, ModelSpec
from control.placement import farm
from control.placement.membership import DeviceSpace, HostFacts, Machine, Space, put_facts
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Host
from control.records import catalog
from control.redis.connection import run
from control.replicas import health
from tests.acceptance.console.browser import scrolls_sideways
from tests.acceptance.console.conftest import Visit
from tests.acceptance.console.scripted_farm import ScriptedFarm, ScriptedReplica
from tests.acceptance.console.test_console import HOSTILE

pytestmark = pytest.mark.timeout(180)

GIB = 2**30


@pytest.fixture
def full_disk(scripted: ScriptedFarm) -> Iterator[None]:
    """The host alpha has little space, a clock that is wrong and a kernel with a hostile name switched off."""
    facts = HostFacts(
        at_ms=0,
        version="1",
        clock_ms=-7_000,
        round_trip_ms=0.4,
        models=Space(path=f"/models/{HOSTILE}/{'long' * 40}", total=500 * GIB, free=GIB // 2),
        cache=Space(path="/cache", total=500 * GIB, free=90 * GIB),
        shared_memory=Space(path="/dev/shm", total=64 * GIB, free=60 * GIB),
        compiler=f"g++ {HOSTILE}",
        native="",
        kernels_off=[f"{HOSTILE}: differs"],
        files={},
        machine=Machine(processors=12, load=3.25, memory=64 * GIB, free=16 * GIB),
        devices={"cuda:0": DeviceSpace(total=80 * GIB, free=20 * GIB)},
    )
    run(scripted.client, put_facts("alpha", facts))
    yield
    scripted.client.delete(keys.host_facts("alpha"))


@pytest.mark.parametrize("width", [1280, 390])
def test_a_host_s_facts_are_judged_on_both_pages(
    visit: Visit, scripted: ScriptedFarm, full_disk: None, width: int
) -> None:
    """As `furrow doctor` judges them; a host without any facts is no finding."""
    page = visit(width=width)
    finding = page.locator(".findings li.bad").filter(has_text="alpha models: 512 MiB free of 500 GiB")
    finding.get_by_text("Free space on alpha").wait_for()
    page.locator(".findings li.warn").filter(has_text="clocks differ from that of Redis: alpha -7.0 s").wait_for()
    row = page.get_by_role("table", name="Hosts").get_by_role("row").filter(has_text="alpha")
    row.get_by_text("1 error").wait_for()
    row.get_by_text("12 processors, load 3.3").wait_for()
    assert "16 GiB of 64 GiB free" in row.inner_text() and "cuda:0: 20 GiB of 80 GiB free" in row.inner_text()
    servers = page.get_by_role("table", name="Redis").get_by_role("row").nth(1)
    assert "refuses writes" in servers.inner_text() and "append-only" in servers.inner_text()
    assert not scrolls_sideways(page)
    finding.get_by_role("link").click()
    page.get_by_text("Clock beside Redis").wait_for()
    text = page.locator("main").inner_text()
    assert "-7,000 ms" in text and f"g++ {HOSTILE}" in text and f"{HOSTILE}: differs" in text
    assert page.title() != "owned" and not scrolls_sideways(page)


def test_the_fullest_replica_and_a_host_that_is_away(visit: Visit, scripted: ScriptedFarm) -> None:
    """Room in another model's pool is no room for this one; a host may stay away."""
    roomy = scripted.add(ScriptedReplica(ModelSpec(name="roomy", source="roomy"), "beta", kv_used=10))
    scripted.host("gamma", "cuda:0", alive=False)
    try:
        page = visit()
        finding = page.locator(".findings li").filter(has_text="gamma is away")
        finding.get_by_text("Start furrow worker there, or run furrow drain gamma if it shall stay away.").wait_for()
        row = page.get_by_role("table", name="Models").get_by_role("row").filter(has_text="roomy")
        row.get_by_text("0 %").wait_for()
        plot = page.locator(".plot").filter(has_text="Fullest KV memory")
        plot.locator(".value", has_text="63 %").wait_for()
    finally:
        scripted.remove(roomy)
        scripted.client.srem(keys.HOSTS, "gamma")


@pytest.fixture
def short_of_memory(scripted: ScriptedFarm) -> Iterator[None]:
    """The host delta has 8 GiB for ranks; `org/small` has 6 of them, and `org/large` has no place."""
    scripted.host("delta", memory=8 * GIB)
    rank = RankNeed(weights=4 * GIB, kv=0, step=GIB // 2, process=GIB // 2, bytes_per_token=2**18)
    small = ModelSpec(name="org/small", source="org/small", devices=["cpu"])
    small_replica = scripted.add(ScriptedReplica(small, "delta"))
    assignment = Assignment(spec=small, replica="r0", ranks=[0], devices=["cpu"], memory=[6 * GIB], kv_tokens=4096)
    farm.assign(scripted.client, "delta", assignment)
    large = ModelSpec(name="org/large", source="org/large")
    catalog.put_spec(scripted.client, large)
    why = "it needs 6.0 GiB of memory; delta has 2.0 GiB left"
    health.write_status(scripted.client, large.name, "r0", "unplaceable", why, host="delta", tp=0)
    need = ModelNeed(revision=1, context=4096, ranks=[rank])
    for name in (small.name, large.name):
        run(scripted.client, farm.put_need(name, need))
    yield
    scripted.remove(small_replica)
    catalog.forget(scripted.client, large)
    scripted.client.delete(keys.NEEDS)
    scripted.client.srem(keys.HOSTS, "delta")
    del scripted.hosts["delta"]


@pytest.mark.parametrize("width", [1280, 390])
def test_memory_that_is_given_planned_and_needed(
    visit: Visit, scripted: ScriptedFarm, short_of_memory: None, width: int
) -> None:
    """Of hosts on their pages, of a model on its own; without a place it says what each host has left."""
    page = visit(width=width)
    row = page.get_by_role("table", name="Hosts").get_by_role("row").filter(has_text="delta")
    row.get_by_text("6.0 GiB of 8.0 GiB").wait_for()
    row.get_by_role("link").click()
    memory = page.get_by_role("table", name="Memory").get_by_role("row").nth(1)
    memory.wait_for()
    cells = memory.get_by_role("cell").all_inner_texts()
    assert [" ".join(cell.split()) for cell in cells[1:]] == ["8.0 GiB", "6.0 GiB of 8.0 GiB", "2.0 GiB", "64 GiB"]
    replica = page.get_by_role("table", name="Replicas").get_by_role("row").filter(has_text="org/small")
    assert "6.0 GiB" in replica.inner_text() and not scrolls_sideways(page)
    page = visit("#/models/org%2Flarge", width=width)
    page.get_by_text("a replica has no place").wait_for()
    facts = page.locator("section").filter(has_text="A rank needs").inner_text()
    assert "6.0 GiB" in facts and "1.0 GiB for 4,096 tokens" in facts
    fit = page.get_by_role("table", name="Hosts' memory").get_by_role("row").filter(has_text="delta")
    assert " ".join(fit.inner_text().split()).endswith("6.0 GiB 2.0 GiB 4.0 GiB too little") or width == 390
    fit.get_by_text("4.0 GiB too little").wait_for()
    assert not scrolls_sideways(page)
    page = visit("#/models/org%2Fsmall", width=width)
    page.get_by_text("A rank needs").wait_for()
    assert not page.get_by_role("table", name="Hosts' memory").count()


def test_the_memory_of_gpus(visit: Visit, scripted: ScriptedFarm) -> None:
    """Each with what ranks may have of it; a model says what a rank needs there, and which GPU lacks what."""
    devices = {"cuda:0": 24 * GIB, "cuda:1": 8 * GIB}
    scripted.hosts["epsilon"] = Host("epsilon", tuple(devices), memory=64 * GIB, device_memory=devices)
    rank = RankNeed(weights=14 * GIB, kv=0, step=GIB, process=GIB, bytes_per_token=2**18)
    on_gpu = msgspec.structs.replace(rank, weights=7 * GIB, exact=False)
    spec = ModelSpec(name="org/gpu", source="org/gpu")
    catalog.put_spec(scripted.client, spec)
    health.write_status(scripted.client, spec.name, "r0", "unplaceable", "why", host="epsilon", tp=0)
    need = ModelNeed(revision=1, context=4096, ranks=[rank], gpu_ranks=[on_gpu])
    run(scripted.client, farm.put_need(spec.name, need))
    try:
        page = visit("#/hosts/epsilon")
        rows = page.get_by_role("table", name="Memory").get_by_role("row")
        rows.nth(3).wait_for()
        cells = [" ".join(row.split()) for row in rows.all_inner_texts()]
        assert cells[2].startswith("cuda:0 24 GiB 0 bytes of 24 GiB 24 GiB") and cells[3].startswith("cuda:1 8.0 GiB")
        page = visit("#/models/org%2Fgpu")
        page.get_by_text("A rank needs on a GPU").wait_for()
        fits = page.get_by_role("table", name="Hosts' memory").get_by_role("row")
        texts = [" ".join(row.split()) for row in fits.all_inner_texts()]
        assert "epsilon cuda:0 10 GiB 24 GiB fits" in texts
        assert "epsilon cuda:1 10 GiB 8.0 GiB 2.0 GiB too little" in texts
    finally:
        catalog.forget(scripted.client, spec)
        scripted.client.delete(keys.NEEDS)
        scripted.client.srem(keys.HOSTS, "epsilon")
        del scripted.hosts["epsilon"]


def test_one_fault_is_one_finding(visit: Visit, scripted: ScriptedFarm) -> None:
    """A host that is away names its replicas, which are no findings of their own; replicas with one cause are one."""
    scripted.host("delta", "cuda:0", alive=False)
    lost = ScriptedReplica(ModelSpec(name="lost", source="lost"), "delta", failure="its host is gone")
    spec = ModelSpec(name="twins", source="twins", replicas=2)
    twins = [ScriptedReplica(spec, "alpha", replica=replica, failure="no such file") for replica in ("r0", "r1")]
    added = [scripted.add(one) for one in (lost, *twins)]
    try:
        page = visit()
        findings = page.locator(".findings li")
        findings.filter(has_text="twins r0, r1 have failed").get_by_text("no such file").wait_for()
        assert findings.filter(has_text="twins").count() == 1
        findings.filter(has_text="delta is away").get_by_text("1 replica: lost:r0").wait_for()
        assert findings.filter(has_text="lost").count() == 1
    finally:
        for one in added:
            scripted.remove(one)
        farm.forget(scripted.client, "delta")
