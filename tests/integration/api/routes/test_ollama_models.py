"""Ollama's routes about models and the second port: /api/tags, /api/show, /api/ps, /api/version, /api/pull,
/api/delete."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from control.messages import ModelSpec
from control.records import catalog
from control.redis.clients import SyncRedis
from control.replicas import health
from control.version import VERSION
from tests.byte_model import CONTEXT, byte_assets
from tests.integration.api.calling import TEMPLATE
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.ollama import HELLO, chat, lines_of
from tests.integration.api.routes.conftest import make
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until


@pytest.fixture
def caller(server: Server, leader: ScriptedLeader) -> Iterator[ScriptedLeader]:
    """A model with tools and reasoning beside the other one."""
    assets = byte_assets(chat_template=TEMPLATE, generation_config={"temperature": 0.5, "repetition_penalty": 1.25})
    caller = ScriptedLeader(server.url, "caller", assets)
    caller.start()
    yield caller
    caller.stop()


def test_models_are_listed(http: httpx.Client, leader: ScriptedLeader, caller: ScriptedLeader) -> None:
    """Names, and the moment at which each was loaded first, for /api/tags and /api/ps."""
    until(lambda: len(http.get("/api/tags").json()["models"]) == 2)
    models = http.get("/api/tags").json()["models"]
    assert [(model["name"], model["model"]) for model in models] == [("caller", "caller"), ("tiny", "tiny")]
    assert {datetime.datetime.fromisoformat(model["modified_at"]).timestamp() for model in models} == {
        leader.assets.created
    }
    assert len({model["digest"] for model in models}) == 2  # clients take models with one digest for the same
    assert all(len(model["digest"]) == 64 for model in models)
    running = http.get("/api/ps").json()["models"]
    assert {model["digest"] for model in running} == {model["digest"] for model in models}
    assert {model["name"]: model["context_length"] for model in running} == {"caller": CONTEXT, "tiny": CONTEXT}
    assert all(datetime.datetime.fromisoformat(model["expires_at"]).year == 9999 for model in running)


def test_a_model_shows_what_it_can_do(http: httpx.Client, leader: ScriptedLeader, caller: ScriptedLeader) -> None:
    """Capabilities from its template and files, its context, template and defaults."""
    until(lambda: http.post("/api/show", json={"model": "caller"}).status_code == 200)
    shown = http.post("/api/show", json={"model": "caller", "verbose": True}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == TEMPLATE
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == CONTEXT
    assert shown["parameters"].splitlines() == ["temperature 0.5", "repeat_penalty 1.25"]
    assert shown["modelfile"].splitlines()[0] == "FROM caller"
    assert http.post("/api/show", json={"name": "tiny"}).json()["capabilities"] == ["completion", "tools"]
    absent = http.post("/api/show", json={"model": "absent"})
    assert absent.status_code == 404 and "absent" in absent.json()["error"]
    assert http.post("/api/show", json={}).status_code == 400


@pytest.mark.parametrize(
    ("model", "template", "capabilities", "status"),
    [("chatty", "{{ messages[0].content }}", ["completion", "tools"], 200), ("base", None, ["completion"], 422)],
)
def test_tools_are_a_capability_of_every_model_that_chats(
    http: httpx.Client, server: Server, model: str, template: str | None, capabilities: list[str], status: int
) -> None:
    """Where the template has no variable for them a chat is served all the same; without a template none is."""
    leader = ScriptedLeader(server.url, model, byte_assets(chat_template=template))
    leader.start()
    try:
        shown = until(lambda: http.post("/api/show", json={"model": model}).json().get("capabilities"))
        assert shown == capabilities
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "tools": [tool], "stream": False}
        assert http.post("/api/chat", json=body).status_code == status
    finally:
        leader.stop()


def test_a_name_may_have_the_tag_latest(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Ollama's clients add it; answers show the name as it was sent. Other tags are other models."""
    lines = lines_of(chat(http, model="tiny:latest"))
    assert {line["model"] for line in lines} == {"tiny:latest"} and lines[-1]["done"]
    assert http.post("/api/show", json={"model": "tiny:latest"}).status_code == 200
    assert chat(http, model="tiny:8b").status_code == 404
    assert chat(http, model=":latest").status_code == 404


def test_the_versions(http: httpx.Client) -> None:
    """That of Ollama whose API is served, by which clients decide what they may send; and that of this server."""
    answer = http.get("/api/version").json()
    assert answer["furrow"] == VERSION
    assert [int(part) for part in answer["version"].split(".")] >= [0, 6, 4]
    assert http.get("/").text == "Furrow is running" and http.head("/").status_code == 200
    browser = http.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["location"], browser.headers["vary"]) == (307, "console/", "accept")


def test_a_key_sees_its_models_only(guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis) -> None:
    """In both lists."""
    for models, seen in ((["tiny"], ["tiny"]), (["other"], [])):
        headers = {"authorization": f"Bearer {make(redis_client, models=models)}"}
        for path in ("/api/tags", "/api/ps"):
            listed = httpx.get(f"{guarded.url}{path}", headers=headers).json()["models"]
            assert [model["name"] for model in listed] == seen


def test_pull_and_delete_are_for_operators(guarded: ApiProcess, redis_client: SyncRedis) -> None:
    """401 without a key, 403 with one that has not the right; nothing is changed."""
    plain = {"authorization": f"Bearer {make(redis_client)}"}
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        for headers, status in (({}, 401), (plain, 403)):
            refused = httpx.request(method, f"{guarded.url}{path}", json={"model": "tiny"}, headers=headers)
            assert (refused.status_code, refused.json().keys()) == (status, {"error"})
    for headers, status in (({}, 401), (plain, 403)):
        assert httpx.delete(f"{guarded.url}/v1/models/tiny", headers=headers).status_code == status
        absent = httpx.delete(f"{guarded.url}/v1/models/absent", headers=headers).status_code
        assert absent == (404 if headers else 401)
    spec = catalog.get_spec(redis_client, "tiny")
    assert spec is not None and not spec.unload


def test_a_model_is_pulled_until_it_is_loaded(
    operator: httpx.Client, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """One that is loaded succeeds at once; another becomes desired under the name that was sent, and a client that
    leaves ends the wait alone."""
    for name in ("tiny", "tiny:latest"):
        pulled = operator.post("/api/pull", json={"model": name})
        assert pulled.headers["content-type"] == "application/x-ndjson"
        lines = lines_of(pulled)
        assert lines[0]["status"] == "pulling manifest" and lines[-1] == {"status": "success"}
        whole = operator.post("/api/pull", json={"model": name, "stream": False})
        assert whole.json() == {"status": "success"}
    assert catalog.get_spec(redis_client, "tiny") == ModelSpec(name="tiny", source="script")
    name = "hf.co/farm/Model-GGUF:Q4_K_M"
    with operator.stream("POST", "/api/pull", json={"model": name}) as response:
        reader = response.iter_lines()
        assert "pulling manifest" in next(reader)
        next(reader)  # its state: no host has room for it
    spec = catalog.get_spec(redis_client, name)
    assert spec is not None and (spec.source, spec.gguf) == ("farm/Model-GGUF", "Q4_K_M")
    assert operator.request("DELETE", "/api/delete", json={"model": name}).json() == {"status": "success"}
    spec = catalog.get_spec(redis_client, name)
    assert spec is None or spec.unload
    wrong = operator.post("/api/pull", json={"model": "two words"})
    assert wrong.status_code == 400 and wrong.json().keys() == {"error"}
    absent = operator.request("DELETE", "/api/delete", json={"model": "absent"})
    assert absent.status_code == 404 and "absent" in absent.json()["error"]


def test_a_pull_that_fails_leaves_nothing(
    operator: httpx.Client, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """A name that no agent finds is an error, and is not desired any more; a model that was there stays."""
    with operator.stream("POST", "/api/pull", json={"model": "farm/mistyped"}) as response:
        reader = response.iter_lines()
        next(reader)
        health.write_status(redis_client, "farm/mistyped", "r0", "failed", "no such repository", revision=1)
        last = [msgspec.json.decode(line) for line in reader][-1]
    assert last.keys() == {"error"} and "no such repository" in last["error"]
    spec = catalog.get_spec(redis_client, "farm/mistyped")
    assert spec is None or spec.unload
    health.clear_status(redis_client, "farm/mistyped", "r0")
    health.write_status(redis_client, "tiny", "r0", "failed", "the weights are gone", revision=1)
    try:
        refused = operator.post("/api/pull", json={"model": "tiny", "stream": False})
    finally:
        health.clear_status(redis_client, "tiny", "r0")
    assert refused.status_code == 503 and "the weights are gone" in refused.json()["error"]
    spec = catalog.get_spec(redis_client, "tiny")
    assert spec is not None and not spec.unload


def test_a_second_port(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """Both answer, all routes alike, and both end with the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with running_api(server.url, tmp_path, "--ollama-port", str(port)) as api:
        for base in (api.url, f"http://127.0.0.1:{port}"):
            with httpx.Client(base_url=base, timeout=40) as client:
                assert lines_of(chat(client))[-1]["done"]
                assert client.get("/v1/models").status_code == 200
        body = {"model": "tiny", "messages": HELLO}
        leader.pause()
        with httpx.stream("POST", f"http://127.0.0.1:{port}/api/chat", json=body, timeout=40) as response:
            leader.step()
            reader = response.iter_lines()
            next(reader)
            api.process.terminate()
            until(lambda: any(line.get("action") == "drain" for line in api.lines))
            leader.resume()
            assert '"done":true' in [*reader][-1]
        assert api.process.wait(40) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/")


def test_a_model_is_unloaded_by_openai_s_route(
    operator: httpx.Client, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """As by /api/delete, for an operator; names may have slashes."""
    catalog.put_spec(redis_client, ModelSpec(name="org/other", source="script"))
    catalog.enter_name(redis_client, "org/other")
    until(lambda: operator.get("/v1/models/org/other").status_code == 200, 40)
    answer = operator.delete("/v1/models/org/other")
    assert answer.json() == {"id": "org/other", "object": "model", "deleted": True}
    spec = catalog.get_spec(redis_client, "org/other")
    assert spec is None or spec.unload
