"""The operator's routes do what `furrow` does: for operators only."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from control import access
from control.messages import Assignment, ModelSpec
from control.placement import farm, membership
from control.placement.membership import Space, put_facts
from control.placement.need import ModelNeed, RankNeed
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.routes.conftest import make
from tests.integration.api.sse import chat
from tests.integration.ops.populated import FACTS
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

READS = ("/farm", "/farm/models", "/farm/hosts", "/farm/requests", "/farm/dead", "/farm/keys", "/farm/usage")


def test_farm_routes_are_for_operators_only(
    guarded: ApiProcess, redis_client: SyncRedis, operator: httpx.Client
) -> None:
    """401 without a key, 403 with one that has not the right, a fixed one included."""
    plain = make(redis_client)
    for path in READS:
        assert httpx.get(f"{guarded.url}{path}").status_code == 401, path
        for secret in (plain, "fixed"):
            refused = httpx.get(f"{guarded.url}{path}", headers={"x-api-key": secret})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden"), path
        assert operator.get(path).status_code == 200, path
    for path in ("/farm/models/unload", "/farm/requests/cancel", "/farm/keys", "/farm/hosts/drain"):
        assert httpx.post(f"{guarded.url}{path}", json={}, headers={"x-api-key": plain}).status_code == 403, path


def test_on_loopback_without_keys_it_is_open(http: httpx.Client) -> None:
    """To this machine directly: to no page from elsewhere in its browser, and to nothing that a proxy passes on."""
    assert http.get("/farm").status_code == 200
    for headers in (
        {"origin": "https://evil.example"},
        {"host": "evil.example"},
        {"sec-fetch-site": "cross-site"},
        {"forwarded": "for=192.0.2.1"},
        {"x-forwarded-for": "192.0.2.1"},
        {"x-forwarded-host": "farm.example"},
        {"via": "1.1 proxy"},
        {"x-real-ip": "192.0.2.1"},
    ):
        refused = http.post("/farm/models/unload", json={"model": "tiny"}, headers=headers)
        assert refused.status_code == 403, headers


def test_an_operator_s_key_passes_a_proxy(operator: httpx.Client) -> None:
    """Where a key is asked for, the key is what counts."""
    assert operator.get("/farm", headers={"x-forwarded-for": "192.0.2.1", "via": "1.1 proxy"}).status_code == 200


def test_open_to_all_is_not_open_to_operate(
    server: Server, leader: ScriptedLeader, redis_client: SyncRedis, tmp_path: Any
) -> None:
    """Where others can reach it, --no-auth lets everybody ask the models and nobody command the farm without a key."""
    with running_api(server.url, tmp_path, "--host", "0.0.0.0", "--no-auth") as process:
        assert httpx.post(f"{process.url}/v1/chat/completions", json=chat("x")).status_code == 200
        assert httpx.get(f"{process.url}/farm").status_code == 401
        headers = {"x-api-key": make(redis_client, admin=True)}
        assert httpx.get(f"{process.url}/farm", headers=headers).status_code == 200


def test_the_farm_at_one_look(operator: httpx.Client, leader: ScriptedLeader, redis_client: SyncRedis) -> None:
    """Models with their replicas, hosts with what they were given, API processes, keys."""
    membership.beat_host(redis_client, Host("alpha", ("cuda:0",)), pid=1, memory_bytes=1)
    body = operator.get("/farm").json()
    assert [(model["model"], model["state"]) for model in body["models"]] == [("tiny", "loaded")]
    assert body["models"][0]["replicas"][0]["beats"][0]["phase"] == "ready"
    [alpha] = [host for host in body["hosts"] if host["id"] == "alpha"]
    assert (alpha["id"], alpha["alive"], alpha["devices"], alpha["drained"]) == ("alpha", True, ["cuda:0"], False)
    assert body["apis"] and body["keys"] >= 1
    [server] = body["redis"]
    assert server["used"] > 0 and server["eviction"] == "noeviction" and server["persistence"] == "ok"


def test_hosts_have_their_facts_and_what_is_wrong(operator: httpx.Client, redis_client: SyncRedis) -> None:
    """As `furrow doctor` judges it, with the remedy, also in `GET /farm`; a host can be asked for alone."""
    for name in ("known", "other"):
        membership.beat_host(redis_client, Host(name), pid=1, memory_bytes=1)
    wrong = msgspec.structs.replace(FACTS, models=Space(path="/models", total=2**40, free=2**20), kernels_off=["x: y"])
    run(redis_client, put_facts("known", wrong))
    [known] = operator.get("/farm/hosts", params={"host": "known"}).json()["data"]
    assert known["facts"]["models"]["free"] == 2**20 and known["facts"]["compiler"] == FACTS.compiler
    findings_by_check = {one["check"]: one for one in known["findings"]}
    assert (findings_by_check["models"]["level"], findings_by_check["kernels"]["level"]) == ("error", "warning")
    assert findings_by_check["models"]["remedy"].startswith("Free space on known")
    hosts = {one["id"]: one for one in operator.get("/farm/hosts").json()["data"]}
    assert hosts["other"]["facts"] is None and [one["check"] for one in hosts["other"]["findings"]] == ["facts"]
    about = [one for one in operator.get("/farm").json()["findings"] if one["where"] == "known"]
    assert [one["check"] for one in about if one["level"] == "error"] == ["models"]
    assert operator.get("/farm/hosts", params={"host": "none"}).json()["data"] == []


def test_hosts_have_their_memory_and_models_their_need(operator: httpx.Client, redis_client: SyncRedis) -> None:
    """What ranks may have, what replicas were given of it and what is left; a need that is unknown is empty."""
    spec = ModelSpec(name="sized", source="/m", tp=2)
    catalog.put_spec(redis_client, spec)
    membership.beat_host(redis_client, Host("planned", memory=8 << 30), pid=1, memory_bytes=7 << 30)
    membership.beat_host(redis_client, Host("unplanned"), pid=1, memory_bytes=3 << 30)
    assert operator.get("/farm/models/memory", params={"model": "sized"}).json()["ranks"] == []
    rank = RankNeed(weights=1 << 30, kv=0, step=0, process=0, bytes_per_token=1 << 18)
    run(redis_client, farm.put_need("sized", ModelNeed(revision=1, context=4096, ranks=[rank, rank])))
    assignment = Assignment(
        spec=spec, replica="r0", ranks=[0, 1], devices=["cpu", "cpu"], memory=[3 << 30, 2 << 30], kv_tokens=4096
    )
    farm.assign(redis_client, "planned", assignment)
    cards = {one["id"]: one for one in operator.get("/farm").json()["hosts"]}
    assert cards["planned"]["memory"] == [
        {"device": "cpu", "given": 8 << 30, "assigned": 5 << 30, "left": 3 << 30, "free": 7 << 30}
    ]
    assert cards["planned"]["assigned"] == {"sized:r0": 5 << 30}
    assert cards["unplanned"]["memory"] == [
        {"device": "cpu", "given": None, "assigned": 0, "left": 3 << 30, "free": 3 << 30}
    ]
    body = operator.get("/farm/models/memory", params={"model": "sized"}).json()
    assert body["kv_tokens"] == 4096 and [one["kv"] for one in body["ranks"]] == [1 << 30, 1 << 30]
    fits = {one["host"]: (one["needs"], one["has"]) for one in body["hosts"]}
    assert fits["planned"] == fits["unplanned"] == (4 << 30, 3 << 30)
    assert operator.get("/farm/models/memory", params={"model": "none"}).json()["ranks"] == []
    farm.remove_assignment(redis_client, "planned", "sized", "r0")
    run(redis_client, farm.forget_need("sized"))
    catalog.forget(redis_client, spec)


def test_the_farm_is_streamed(operator: httpx.Client, leader: ScriptedLeader) -> None:
    """A snapshot a second as server-sent events, with what an operator has changed meanwhile; for operators alone."""
    found: list[dict[str, Any]] = []
    with operator.stream("GET", "/farm/events", timeout=20) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                if len(found) == 1:
                    assert operator.post("/farm/models/pause", json={"model": "tiny"}).status_code == 200
                if found[-1]["models"][0]["paused"]:
                    break
    assert operator.post("/farm/models/resume", json={"model": "tiny"}).status_code == 200
    assert 2 <= len(found) <= 8 and found[0]["models"][0]["load"]["queued"] == 0


def test_the_stream_of_a_revoked_key_ends(guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis) -> None:
    """An open page shows nothing more once its key is revoked."""
    key, secret = access.mint(admin=True)
    access.create(redis_client, key)
    headers = {"x-api-key": secret}
    with httpx.stream("GET", f"{guarded.url}/farm/events", headers=headers, timeout=20) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: farm"
        access.revoke(redis_client, key)
        assert sum(line == "event: farm" for line in lines) < 15  # until its end; else the test's time is up


def test_models_are_loaded_changed_and_unloaded(operator: httpx.Client, redis_client: SyncRedis) -> None:
    """The desired state is what was asked for; what can't be is refused by name."""
    load = {"source": "org/other", "name": "other", "tp": 2, "devices": "cpu"}
    assert operator.post("/farm/models/load", json=load).json()["revision"] == 1
    spec = catalog.get_spec(redis_client, "other")
    assert spec is not None and (spec.source, spec.tp, spec.devices) == ("org/other", 2, ["cpu", "cpu"])
    shown = operator.get("/farm/models/spec", params={"model": "other"}).json()
    assert (shown["source"], shown["tp"], shown["revision"]) == ("org/other", 2, 1)
    assert operator.get("/farm/models/spec", params={"model": "none"}).json()["error"]["code"] == "model_not_found"
    assert "already" in operator.post("/farm/models/load", json=load).json()["done"]
    assert operator.post("/farm/models/reload", json={"model": "other"}).json()["revision"] == 2
    assert operator.post("/farm/models/scale", json={"model": "other", "replicas": 3}).status_code == 200
    spec = catalog.get_spec(redis_client, "other")
    assert spec is not None and spec.replicas == 3
    for body, param in (({"source": "x", "tp": 0}, "tp"), ({"source": "x", "dtype": "int3"}, "dtype"), ({}, "source")):
        refused = operator.post("/farm/models/load", json=body)
        assert refused.status_code == 400 and param in refused.json()["error"]["message"], body
    wrong = operator.post("/farm/models/load", json={"source": "x", "devices": "tpu"})
    assert (wrong.status_code, "'tpu'" in wrong.json()["error"]["message"]) == (400, True)
    assert operator.post("/farm/models/unload", json={"model": "other"}).status_code == 200
    assert operator.post("/farm/models/reload", json={"model": "other"}).json()["error"]["code"] == "invalid_setting"
    assert operator.post("/farm/models/unload", json={"model": "none"}).json()["error"]["code"] == "model_not_found"
    spec = catalog.get_spec(redis_client, "other")
    assert spec is not None and spec.unload
    catalog.forget(redis_client, spec)


def test_a_paused_model_keeps_its_requests(
    operator: httpx.Client, guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """The running answer is finished, a new request waits, and a resumed model answers it; the process stays ready."""
    leader.pause()
    headers, url = {"x-api-key": make(redis_client)}, f"{guarded.url}/v1/chat/completions"

    def ask(text: str) -> str:
        answer = httpx.post(url, json=chat(text), headers=headers, timeout=40).json()
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, "before")
        until(lambda: leader.claimed)
        assert operator.post("/farm/models/pause", json={"model": "tiny"}).json()["done"] == "tiny: paused."
        assert "already" in operator.post("/farm/models/pause", json={"model": "tiny"}).json()["done"]
        waiting = pool.submit(ask, "behind")
        leader.resume()
        assert running.result() == "you said before"
        until(lambda: operator.get("/farm/models").json()["data"][0]["queued"] == 1)
        assert operator.get("/farm/models").json()["data"][0]["paused"] and not waiting.done()
        assert operator.get("/ready").status_code == 200
        assert operator.post("/farm/models/load", json={"source": "script", "name": "tiny"}).status_code == 200
        assert operator.get("/farm/models").json()["data"][0]["paused"]
        assert operator.post("/farm/models/resume", json={"model": "tiny"}).json()["done"] == "tiny: resumed."
        assert waiting.result() == "you said behind"
    assert "not paused" in operator.post("/farm/models/resume", json={"model": "tiny"}).json()["done"]
    assert operator.post("/farm/models/pause", json={"model": "none"}).status_code == 404
    assert operator.get("/farm/history", params={"model": "tiny"}).json() == {"data": [], "object": "list"}
    assert operator.get("/farm/history", params={"model": "none"}).status_code == 404


def test_a_key_is_created_limited_and_revoked_over_http(
    operator: httpx.Client, guarded: ApiProcess, leader: ScriptedLeader
) -> None:
    """A key is made with its secret shown once, limited, and revoked; its own usage it sees itself."""
    made = operator.post("/farm/keys", json={"name": "bob", "rpm": 100})
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    secret, key_id = made.json()["secret"], made.json()["id"]
    headers = {"x-api-key": secret}
    answer = httpx.post(f"{guarded.url}/v1/chat/completions", json=chat("x"), headers=headers, timeout=40)
    usage = answer.json()["usage"]
    own = until(lambda: httpx.get(f"{guarded.url}/v1/usage", headers=headers).json()["data"])
    assert [(one["requests"], one["prompt_tokens"], one["completion_tokens"]) for one in own] == [
        (1, usage["prompt_tokens"], usage["completion_tokens"])
    ]
    assert operator.get("/farm/usage", params={"key": "bob", "days": 1}).json()["data"] == own
    assert operator.post("/farm/keys/limits", json={"key": "bob", "rpm": 7}).json()["rpm"] == 7
    assert operator.post("/farm/keys/limits", json={"key": "bob"}).status_code == 400
    assert operator.post("/farm/keys", json={"priority_cap": "urgent"}).status_code == 400
    assert operator.post("/farm/keys/revoke", json={"key": key_id}).json()["state"] == "revoked"
    assert operator.post("/farm/keys/revoke", json={"key": "nobody"}).status_code == 404
    text = operator.get("/farm/keys").text
    assert key_id in text and secret not in text and access.hash_secret(secret) not in text
    until(lambda: httpx.get(f"{guarded.url}/v1/usage", headers=headers).status_code == 401, 10)


def test_usage_needs_a_key_and_a_bound(http: httpx.Client, operator: httpx.Client) -> None:
    """Nothing is counted for those who bring none; more days than are kept are refused."""
    assert http.get("/v1/usage").json()["error"]["code"] == "no_api_key"
    assert operator.get("/v1/usage", params={"days": 0}).json()["error"]["param"] == "days"


def test_hosts_and_replicas_drain(operator: httpx.Client, redis_client: SyncRedis) -> None:
    """The wanted state of hosts is in Redis afterwards; unknown hosts are named."""
    membership.beat_host(redis_client, Host("beta"), pid=1, memory_bytes=1)
    spec = ModelSpec(name="moving", source="s")
    farm.assign(redis_client, "beta", Assignment(spec=spec, replica="r0", ranks=[0], devices=["cpu"]))
    assert operator.post("/farm/hosts/drain", json={"host": "beta"}).status_code == 200
    assert membership.drained_hosts(redis_client) == {"beta"}
    assert operator.post("/farm/hosts/drain", json={"host": "beta", "undo": True}).status_code == 200
    assert membership.drained_hosts(redis_client) == set()
    assert operator.post("/farm/hosts/drain", json={"host": "nowhere"}).json()["error"]["param"] == "host"
    assert operator.post("/farm/replicas/drain", json={"model": "moving", "replica": "r0"}).status_code == 200
    assert [one.withdrawn for one in farm.assignments(redis_client, "beta")] == [True]
    assert operator.post("/farm/replicas/drain", json={"model": "moving", "replica": "r9"}).status_code == 400


def test_a_host_is_forgotten_once_it_is_away_and_empty(operator: httpx.Client, redis_client: SyncRedis) -> None:
    """Refused with the reason while it is unknown, beats or has a replica; its drain is forgotten with it."""

    def forget() -> httpx.Response:
        return operator.post("/farm/hosts/forget", json={"host": "lost"})

    assert forget().status_code == 400 and "is unknown" in forget().text
    membership.beat_host(redis_client, Host("lost"), pid=1, memory_bytes=1)
    redis_client.persist("furrow:host:lost")  # as that of an agent of an older version that died at once
    assignment = Assignment(spec=ModelSpec(name="held", source="s"), replica="r0", ranks=[0], devices=["cpu"])
    farm.assign(redis_client, "lost", assignment)
    assert "has replicas: held:r0" in forget().text
    farm.remove_assignment(redis_client, "lost", "held", "r0")
    membership.drain(redis_client, "lost")
    redis_client.pexpire("furrow:host:lost", 60_000)
    assert forget().status_code == 400 and "is alive" in forget().text
    redis_client.persist("furrow:host:lost")
    assert forget().status_code == 200
    assert "lost" not in membership.known_hosts(redis_client) and "lost" not in membership.drained_hosts(redis_client)
    assert not redis_client.keys("furrow:*:lost")
    hosts = {host["id"]: host["replicas"] for host in operator.get("/farm/hosts").json()["data"]}
    assert hosts["beta"] == ["moving:r0"]
    farm.remove_assignment(redis_client, "beta", "moving", "r0")
