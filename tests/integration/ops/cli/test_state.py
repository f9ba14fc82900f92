"""`furrow top`, `hosts`, `history` and `requests`: as an operator types them, against a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from control import keys
from control import requests as control_requests
from control.clock import now_ms
from control.errors import ModelNotFound, RequestNotFound, SettingsError
from control.messages import Assignment, GenerationRequest, LogEntry, ModelSpec, Sampling
from control.placement import farm, membership
from control.placement.membership import DeviceSpace, put_facts
from control.placement.need import DeviceRoom
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect, run
from control.replicas import health, model_overviews
from control.replicas.lease import Lease, acquire
from control.requests import Emission, Enqueue
from ops.cli.hosts import drain, hosts
from ops.cli.plan import free_memory, plan
from ops.cli.ps import history
from ops.cli.requests import requests
from ops.cli.top import Rates, top
from tests.integration.ops.populated import FACTS
from tests.servers import Server

MODEL = "m"


@dataclass
class Scene:
    """A farm in Redis alone: one model, one host, one leader whose words a test writes."""

    client: SyncRedis
    url: str
    lease: Lease

    def ask(self, command: click.Command, *words: str) -> Result:
        return CliRunner().invoke(command, [*words, "--redis", self.url])

    def json(self, command: click.Command, *words: str) -> Any:
        ended = self.ask(command, *words, "--json")
        assert ended.exit_code == 0, ended.output
        return json.loads(ended.output)

    def beat(self, rank: int = 0, **fields: Any) -> None:
        words = {"epoch": self.lease.epoch, "seq": 5, "oldest_pending_ms": 0, "device": "cpu", "memory_bytes": 1}
        beat = health.Beat(**(words | {"phase": "ready", "pid": 7, "host": "alpha"} | fields))
        run(self.client, health.beat(MODEL, "r0", rank, beat))

    def put(self, rid: str, **fields: Any) -> None:
        params = GenerationRequest(prompt=[7, 8, 9], sampling=Sampling(max_tokens=5))
        run(self.client, control_requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant="t", **fields)))


@pytest.fixture
def scene(new_server: Server) -> Iterator[Scene]:
    with connect(new_server.url) as client:
        client.flushall()
        catalog.put_spec(client, ModelSpec(name=MODEL, source="/x", tp=2))
        lease = run(client, acquire(MODEL, "r0", "alpha/1", 2))
        assert lease is not None
        run(client, catalog.put_replica(MODEL, "r0", catalog.Assigned(revision=1, tp=2)))
        yield Scene(client, new_server.url, lease)


def test_requests_are_listed_shown_and_cancelled(scene: Scene) -> None:
    """Whosever they are, with their phases; a cancelled one is shown as it ended."""
    assert scene.ask(requests, "list").output == "No requests wait or run.\n"
    scene.put("one")
    scene.put("two")
    run(scene.client, control_requests.claim(scene.lease, 1, 100))
    emission = Emission("one", 1, [LogEntry(1, 0, 5), LogEntry(2, 0, 6, "length")], "finished", {"cached_tokens": 2})
    found = scene.json(requests, "list")
    assert [(one["id"], one["state"], one["replica"]) for one in found] == [
        ("one", "running", "r0"),
        ("two", "queued", ""),
    ]
    assert scene.json(requests, "list", "--tenant", "nobody") == []
    assert scene.ask(requests, "list", "--model", MODEL).output.split()[10:14:2] == ["one", "running"]
    run(scene.client, control_requests.emit(scene.lease, [emission]))
    life = scene.json(requests, "show", "one")
    assert (life["state"], life["completion_tokens"], life["cached_tokens"]) == ("finished", 2, 2)
    names = [phase["name"] for phase in life["phases"]]
    assert names[-4:] == ["queued", "claimed", "first token", "ended"]
    assert "finished" in scene.ask(requests, "show", "one").output.splitlines()[0]
    assert scene.ask(requests, "cancel", "two").output == "two: is cancelled.\n"
    assert "cancelled by the operator" in scene.ask(requests, "show", "two").output


def test_what_is_not_there_is_said(scene: Scene) -> None:
    """A request or a model that nobody knows: its name, and what there is."""
    for words in (("show", "none"), ("cancel", "none")):
        assert isinstance(scene.ask(requests, *words).exception, RequestNotFound)
    assert isinstance(scene.ask(requests, "list", "--model", "none").exception, ModelNotFound)
    assert isinstance(scene.ask(history, "none").exception, ModelNotFound)


def test_a_request_s_life_has_the_faults_of_its_replica(scene: Scene) -> None:
    """A poison while it ran stands among its phases, by time."""
    scene.put("one")
    run(scene.client, control_requests.claim(scene.lease, 1, 100))
    assert health.write_poison(scene.client, MODEL, "r0", scene.lease.epoch, 1, "exited", "rank 1 was killed")
    phases = scene.json(requests, "show", "one")["phases"]
    assert (phases[-1]["name"], phases[-1]["detail"]) == ("fault: exited", "rank 1 was killed")


def test_a_request_s_life_goes_over_epochs_and_replicas(scene: Scene) -> None:
    """Each hand-over with the fault that ended it; another replica's faults of that time are not the request's."""
    scene.put("one")
    run(scene.client, control_requests.claim(scene.lease, 1, 100))
    assert health.write_poison(scene.client, MODEL, "r0", scene.lease.epoch, 1, "exited", "rank 1 was killed")
    time.sleep(0.002)  # moments of one millisecond have no order
    scene.client.delete(scene.lease.keys.lock)
    second = run(scene.client, acquire(MODEL, "r0", "alpha/2", 2))
    assert second is not None
    run(scene.client, control_requests.adopt(second))
    formation = health.Formation(second.epoch, now_ms(), now_ms() + 5, now_ms() + 6, now_ms() + 7)
    run(scene.client, health.note_formation(MODEL, "r0", formation))
    other = run(scene.client, acquire(MODEL, "r1", "beta/1", 2))
    assert other is not None
    assert health.write_poison(scene.client, MODEL, "r1", other.epoch, 0, "deadline", "not of this request")
    time.sleep(0.002)
    scene.client.delete(second.keys.lock, other.keys.lock)
    other = run(scene.client, acquire(MODEL, "r1", "beta/2", 2))
    assert other is not None
    run(scene.client, control_requests.takeover(other, "r0"))
    life = scene.json(requests, "show", "chatcmpl-one")
    assert [(one["replica"], one["epoch"]) for one in life["epochs"]] == [
        ("r0", scene.lease.epoch),
        ("r0", second.epoch),
        ("r1", other.epoch),
    ]
    assert [one["fault"] and one["fault"]["kind"] for one in life["epochs"]] == ["exited", None, None]
    names = [phase["name"] for phase in life["phases"]]
    assert names.index("claimed") < names.index("fault: exited") < names.index("adopted")
    assert names.count("adopted") == 2 and "fault: deadline" not in names and "epoch" in names and life["attempts"] == 3


def test_hosts(scene: Scene) -> None:
    """Those that beat, those that are drained, and those that were seen once."""
    assert scene.ask(hosts).output.startswith("No hosts.")
    membership.beat_host(scene.client, Host("alpha", ("cuda:0",)), pid=1, memory_bytes=1)
    membership.beat_host(scene.client, Host("beta", ()), pid=1, memory_bytes=1)
    farm.assign(
        scene.client,
        "alpha",
        Assignment(spec=ModelSpec(name=MODEL, source="/x"), replica="r0", ranks=[0], devices=["cpu"]),
    )
    membership.drain(scene.client, "beta")
    scene.client.pexpire("furrow:host:alpha", 60_000)
    scene.client.delete("furrow:host:beta")
    rows_by_id = {one["id"]: one for one in scene.json(hosts)}
    assert (rows_by_id["alpha"]["state"], rows_by_id["alpha"]["devices"], rows_by_id["alpha"]["replicas"]) == (
        "alive",
        ["cuda:0"],
        ["m:r0"],
    )
    assert rows_by_id["beta"]["state"] == "drained"
    assert "alpha  alive" in scene.ask(hosts).output
    with pytest.raises(SettingsError, match="is alive; stop its worker first"):
        CliRunner().invoke(drain, ["alpha", "--forget", "--redis", scene.url], catch_exceptions=False)
    assert "beta: forgotten." in scene.ask(drain, "beta", "--forget").output
    assert [one["id"] for one in scene.json(hosts)] == ["alpha"] and not membership.drained_hosts(scene.client)


def test_a_plan_has_the_free_memory_of_the_farms_hosts(scene: Scene) -> None:
    """A host without a heartbeat is none of them."""
    scene.client.delete(keys.host("alpha"))
    with pytest.raises(SettingsError, match="no worker is alive"):
        free_memory(scene.url)
    membership.beat_host(scene.client, Host("alpha"), 5, 300 << 20)
    membership.beat_host(scene.client, Host("beta"), 6, 2 << 30)
    assert free_memory(scene.url) == [DeviceRoom("alpha", 300 << 20), DeviceRoom("beta", 2 << 30)]
    assignment = Assignment(spec=ModelSpec(name="n", source="/n"), replica="r0", ranks=[0], devices=["cpu"])
    membership.beat_host(scene.client, Host("gamma", memory=1 << 30), 7, 8 << 30)
    farm.assign(scene.client, "gamma", msgspec.structs.replace(assignment, memory=[1 << 29]))
    assert free_memory(scene.url)[2] == DeviceRoom("gamma", 1 << 29)
    gpus = Host(
        "gamma", ("cuda:0", "cuda:1"), memory=1 << 30, device_memory=dict.fromkeys(("cuda:0", "cuda:1"), 8 << 30)
    )
    membership.beat_host(scene.client, gpus, 7, 8 << 30)
    shared = msgspec.structs.replace(assignment, devices=["cuda:0"], memory=[0], device_memory=[3 << 30])
    farm.assign(scene.client, "gamma", shared)
    unknown = msgspec.structs.replace(assignment, replica="r1", devices=["cuda:1"], memory=[])
    farm.assign(scene.client, "gamma", unknown)
    on_gpus = [DeviceRoom("gamma", 5 << 30, "cuda:0"), DeviceRoom("gamma", 0, "cuda:1")]
    assert free_memory(scene.url)[2:] == [DeviceRoom("gamma", 1 << 30), *on_gpus]
    space = DeviceSpace(total=9 << 30, free=2 << 30)
    run(scene.client, put_facts("gamma", msgspec.structs.replace(FACTS, devices={"cuda:0": space})))
    [gamma] = [card for card in farm.host_cards(scene.client) if card.id == "gamma"]
    assert [(one.device, one.assigned, one.free) for one in gamma.memory[1:]] == [
        ("cuda:0", 3 << 30, 2 << 30),
        ("cuda:1", 0, None),
    ]
    assert gamma.assigned == {"n:r0": 3 << 30}
    scene.client.delete(keys.host_facts("gamma"), keys.assignments("gamma"))
    scene.client.delete(keys.host("gamma"))
    planned = scene.json(plan, "demo", "--kv-tokens", "200000")
    assert [(one["host"], one["has"] > one["needs"]) for one in planned["hosts"]] == [("alpha", False), ("beta", True)]


def test_history_has_epochs_and_their_faults(scene: Scene) -> None:
    """Newest first: the fault that ended an epoch above its formation."""
    assert "No epochs" in scene.ask(history, MODEL).output
    epoch = scene.lease.epoch
    formation = health.Formation(epoch, epoch, epoch + 20, epoch + 50, epoch + 1_250)
    run(scene.client, health.note_formation(MODEL, "r0", formation))
    health.write_poison(scene.client, MODEL, "r0", epoch, -1, "deadline", "a step hangs")
    found = scene.json(history, MODEL)
    assert [(one["event"], one["epoch"]) for one in found] == [("fault", epoch), ("formed", epoch)]
    text = scene.ask(history, MODEL).output
    assert "loaded in 1.2 s" in text and "deadline: a step hangs" in text


def test_top_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """State, queue and ranks; a model without ranks has its reason."""
    monkeypatch.setattr("ops.cli.top.EVERY_S", 0.1)
    scene.put("one")
    scene.beat(running=3, kv_used=50)
    scene.beat(rank=1)
    [model] = scene.json(top, "--once")
    assert (model["model"], model["queued"], model["replicas"][0]["running"]) == (MODEL, 1, 3)
    assert [rank["rank"] for rank in model["replicas"][0]["ranks"]] == [0, 1]
    shown = scene.ask(top, "--once").output
    assert "\nall " not in shown, "one replica is its own total"
    assert "TOK/S" in shown and MODEL in shown
    catalog.forget(scene.client, ModelSpec(name=MODEL, source="/x"))
    assert "No models" in scene.ask(top, "--once").output


def test_rates_are_those_between_two_readings(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and first tokens by difference; counts that begin anew give no rate."""
    clock = [100.0]
    monkeypatch.setattr("ops.cli.top.time", type("Clock", (), {"monotonic": lambda: clock[0]}))
    rates = Rates()

    def read(kv: Callable[[], dict[str, int]] = dict) -> Any:
        [row] = rates.rows(model_overviews.overviews(scene.client), {MODEL: 200})
        clock[0] += 2.0
        return row.replicas[0]

    scene.beat(tokens=100, first_tokens=2, first_tokens_ms=400, kv_used=50)
    first = read()
    assert (first.tokens_per_second, first.first_token_ms, first.kv_usage) == (None, None, 0.25)
    scene.beat(tokens=150, first_tokens=4, first_tokens_ms=1_000)
    second = read()
    assert (second.tokens_per_second, second.first_token_ms) == (25.0, 300.0)
    scene.beat(tokens=3)
    assert read().tokens_per_second is None


def test_the_slow_rank_is_marked(scene: Scene) -> None:
    """In a long command the rank that got on is the one that the others wait for; where all stand still none is."""
    rates = Rates()

    def slow(progress: tuple[int, int], pending_ms: int = 4_000) -> list[int]:
        for rank in (0, 1):
            scene.beat(rank=rank, oldest_pending_ms=pending_ms, progress=progress[rank])
        [row] = rates.rows(model_overviews.overviews(scene.client), {})
        return [rank.rank for rank in row.replicas[0].ranks if rank.slow]

    assert slow((1, 1)) == []
    assert slow((1, 2)) == [1]
    assert slow((1, 2)) == []
    assert slow((2, 3)) == []
    assert slow((2, 9), pending_ms=100) == []
    for rank in (0, 1):
        scene.beat(rank=rank, forward_ms=4_000, waited_ms=3_000 * rank)
    [row] = rates.rows(model_overviews.overviews(scene.client), {})
    assert [rank.slow for rank in row.replicas[0].ranks] == [True, False]
    assert "0:cpu:5 slow" in scene.ask(top, "--once").output
