"""The operator's routes about requests: those that run, one's life and texts, and dead letters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from control import keys, requests
from control.messages import GenerationRequest, ModelSpec, Sampling
from control.records import catalog
from control.records.api_reports import EndedRequest, note
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas.lease import acquire
from control.requests import Enqueue
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.routes.conftest import make
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until


def test_requests_are_seen_and_ended(
    operator: httpx.Client, guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """Whosever they are: waiting or running, with tenant and age; the client learns that its answer was cancelled."""
    leader.pause()
    secret, answers = make(redis_client, tenant="ada"), []

    def ask() -> None:
        url, headers = f"{guarded.url}/v1/chat/completions", {"x-api-key": secret}
        answers.append(httpx.post(url, json=chat("x"), headers=headers, timeout=40))

    thread = threading.Thread(target=ask)
    thread.start()
    [running] = until(lambda: [one for one in _open(operator) if one["state"] == "running"])
    assert (running["model"], running["tenant"], running["cancelled"]) == ("tiny", "ada", False)
    assert 0 <= running["age_ms"] < 40_000 and running["prompt_tokens"] > 0 and running["replica"] == "r0"
    assert _open(operator, tenant="eve") == []
    ended = operator.post("/farm/requests/cancel", json={"id": running["id"]}).json()
    assert ended["done"].endswith("ends with its next step.")
    leader.resume()
    thread.join()
    assert answers[0].json()["error"]["code"] == "request_cancelled"
    assert _open(operator) == []
    assert operator.post("/farm/requests/cancel", json={"id": "none"}).status_code == 404
    life = operator.get(f"/farm/requests/{running['id']}").json()
    assert (life["state"], life["tenant"], len(life["epochs"])) == ("cancelled", "ada", 1)
    assert life["phases"][-1]["name"] == "ended" and life["epochs"][0]["until_ms"] >= life["epochs"][0]["at_ms"]
    assert operator.get("/farm/requests/none").json()["error"]["code"] == "request_not_found"


def test_texts_of_others_are_shown_where_that_was_asked_for(
    server: Server, operator: httpx.Client, letter: Callable[[str], None], leader: ScriptedLeader, tmp_path: Any
) -> None:
    """Prompts and answers need --console-text; without it the refusal names the option. An ended prompt is gone."""
    answer = operator.post("/v1/chat/completions", json=chat("x")).json()
    letter("crash")
    paths = (f"/farm/requests/{answer['id']}/text", "/farm/dead/crash/text?model=grave")
    for path in paths:
        refused = operator.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "text_not_shown"), path
        assert "--console-text" in refused.json()["error"]["message"]
    with running_api(server.url, tmp_path, "--console-text", "--keep-requests", "60") as process:
        shown = httpx.get(process.url + paths[0]).json()
        assert shown["prompt"] is None
        [told] = shown["answers"]
        assert (told["text"], told["finish_reason"]) == (answer["choices"][0]["message"]["content"] + "</s>", "stop")
        assert httpx.get(process.url + paths[1]).json()["params"]["prompt"] == [7, 8]
        body = httpx.post(f"{process.url}/v1/chat/completions", json=chat("behold"), timeout=40).json()
        assert operator.post("/farm/dead/drop", json={"model": "grave", "id": "crash"}).status_code == 200
        assert "behold" in httpx.get(f"{process.url}/farm/requests/{body['id']}/text").json()["prompt"]


def _open(operator: httpx.Client, **query: str) -> list[dict[str, Any]]:
    return operator.get("/farm/requests", params=query).json()["data"]


@pytest.fixture
def letter(redis_client: SyncRedis) -> Iterator[Callable[[str], None]]:
    """Buries a request of a model that has no other life."""
    catalog.put_spec(redis_client, ModelSpec(name="grave", source="s"))
    lease = run(redis_client, acquire("grave", "r0", "host/1", 1))
    assert lease is not None

    def bury(rid: str) -> None:
        params = GenerationRequest(prompt=[7, 8], sampling=Sampling(max_tokens=5))
        run(redis_client, requests.enqueue(Enqueue(rid=rid, model="grave", params=params, tenant="t")))
        run(redis_client, requests.claim(lease, 1, 100))
        assert run(redis_client, requests.bury(lease, rid, "crashed its group alone"))

    yield bury
    spec = catalog.get_spec(redis_client, "grave")
    assert spec is not None
    catalog.forget(redis_client, spec)


def test_dead_letters_are_listed_shown_retried_and_dropped(
    operator: httpx.Client, letter: Callable[[str], None], redis_client: SyncRedis
) -> None:
    """Listed with their cause, shown with all that reproduces them, tried again, dropped."""
    letter("one")
    letter("two")
    listed = operator.get("/farm/dead", params={"model": "grave"}).json()["data"]
    assert {one["id"]: one["cause"] for one in listed} == dict.fromkeys(("one", "two"), "crashed its group alone")
    assert operator.get("/farm").json()["dead_letters"] == {"grave": 2}
    shown = operator.get("/farm/dead/one", params={"model": "grave"}).json()
    assert (shown["prompt_tokens"], "params" in shown) == (2, False)
    again = operator.post("/farm/dead/retry", json={"model": "grave", "id": "one"}).json()["id"]
    assert redis_client.hget(f"furrow:{{grave}}:req:{again}", "state") == "queued"
    assert operator.post("/farm/dead/drop", json={"model": "grave", "id": "two"}).status_code == 200
    assert operator.get("/farm/dead").json()["data"] == []
    assert operator.get("/farm/dead/two", params={"model": "grave"}).status_code == 404


def test_ended_requests_of_the_last_hour(
    operator: httpx.Client, guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """Finished ones, refusals and cancels with their causes and times, the newest first; by model, tenant and end.
    Callers without a right are left out, an hour later all are, and no more than some are kept."""
    secret = make(redis_client, tenant="grace", name="hers")
    redis_client.delete(keys.ENDED)
    with httpx.Client(base_url=guarded.url, headers={"x-api-key": secret}, timeout=40) as http:
        assert http.post("/v1/chat/completions", json=chat("x")).is_success
        assert http.post("/v1/chat/completions", json=chat("x", n=0)).status_code == 400
        assert http.post("/v1/chat/completions", json=chat("x") | {"model": "none"}).status_code == 404
        assert httpx.post(f"{guarded.url}/v1/chat/completions", json=chat("x")).status_code == 401

    def ended(**query: Any) -> list[dict[str, Any]]:
        return operator.get("/farm/requests/ended", params=query).raise_for_status().json()["data"]

    rows = until(lambda: rows if len(rows := ended(tenant="grace")) == 3 else None, 40)
    assert [row["status"] for row in rows] == [404, 400, 200]
    done = rows[-1]
    assert (done["model"], done["tenant"], done["finish_reason"]) == ("tiny", "grace", "stop")
    assert done["completion_tokens"] > 0 and done["first_ms"] <= done["total_ms"] and len(done["key"]) == 12
    assert "'none' does not exist" in rows[0]["error"] and rows[0]["tenant"] == "grace"
    assert [row["status"] for row in ended(failed=True, tenant="grace")] == [404, 400]
    assert ended(failed=False, tenant="grace") == ended(model="tiny", tenant="grace") == [done]
    assert all(row["status"] != 401 for row in ended()) and ended(tenant="eve") == []
    assert 0 < redis_client.pttl(keys.ENDED) <= 3_600_000
    assert httpx.get(f"{guarded.url}/farm/requests/ended", headers={"x-api-key": secret}).status_code == 403
    old = EndedRequest(id="old", path="/", status=200, ended_ms=1, total_ms=1)
    redis_client.delete(keys.ENDED)
    redis_client.xadd(keys.ENDED, {"record": msgspec.json.encode(old)}, id="1-1")
    many = [EndedRequest(id=f"{number}", path="/", status=200, ended_ms=number, total_ms=1) for number in range(6_000)]
    run_every(redis_client, note([*many, many[-1]]))
    assert redis_client.xlen(keys.ENDED) < 5_500
    rows = ended()
    assert len(rows) == 1_000 and [row["id"] for row in rows[:2]] == ["5999", "5998"]
    redis_client.delete(keys.ENDED)
