"""Stored chat completions are read, listed, relabelled and deleted: by OpenAI's client, and by their tenant only."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from control import keys
from control.errors import RequestNotFound
from control.records import catalog
from control.records.responses import KEYLESS
from control.requests.token_log import read_pages
from control.requests.upkeep.replay import find_kept
from tests.integration.api.calling import ASK
from tests.integration.api.conftest import IN_A_HURRY, ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

OWNED, REQUESTS = keys.ResponseKeys(KEYLESS), keys.ModelKeys("tiny")


@pytest.fixture(scope="module")
def api(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    """Its rounds come every 0.3 seconds."""
    with running_api(server.url, tmp_path_factory.mktemp("api"), constants=IN_A_HURRY) as process:
        yield process


def create(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=ASK, store=True, **more)


@pytest.fixture
def same(http: httpx.Client, client: openai.OpenAI) -> Iterator[httpx.Client]:
    """A plain client of the same tenant."""
    with httpx.Client(base_url=http.base_url, headers={"authorization": f"Bearer {client.api_key}"}) as same:
        yield same


def test_a_stored_completion_is_what_was_answered(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Whole, streamed and with choices; with what was asked, its messages and its labels."""
    leader.reply = lambda _: "It rains."
    whole = create(client, n=2, seed=7, metadata={"use": "test"}, temperature=0.5, user="me")
    completion = client.chat.completions.retrieve(whole.id)
    assert [choice.message for choice in completion.choices] == [choice.message for choice in whole.choices]
    assert (completion.usage, completion.created, completion.model) == (whole.usage, whole.created, "tiny")
    item_fields: Any = completion.to_dict()
    assert (item_fields["seed"], item_fields["temperature"], item_fields["input_user"]) == (7, 0.5, "me")
    assert item_fields["metadata"] == {"use": "test"}
    chunks = list(create(client, stream=True))
    streamed = client.chat.completions.retrieve(chunks[0].id)
    assert streamed.choices[0].message.content == "It rains." and streamed.choices[0].finish_reason == "stop"
    messages = client.chat.completions.messages.list(whole.id).data
    assert [(one.to_dict()["role"], one.content) for one in messages] == [(one["role"], one["content"]) for one in ASK]
    assert messages[0].id == f"{whole.id}-0"
    changed = client.chat.completions.update(whole.id, metadata={"use": "other"})
    assert changed.to_dict()["metadata"] == {"use": "other"}
    assert client.chat.completions.delete(whole.id).deleted
    for gone in (lambda: client.chat.completions.retrieve(whole.id), lambda: client.chat.completions.delete(whole.id)):
        with pytest.raises(openai.NotFoundError, match="not found"):
            gone()


def test_lists_have_an_order_pages_and_filters(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """By age, also over a deleted one; by model and by label."""
    label = {"group": uuid.uuid4().hex}
    ids = [create(client, metadata=label | {"at": str(at)}).id for at in range(5)]
    client.chat.completions.delete(ids.pop(2))
    assert [one.id for one in client.chat.completions.list(metadata=label, limit=2)] == ids, "over three pages"
    assert [one.id for one in client.chat.completions.list(metadata=label, order="desc")] == ids[::-1]
    assert [one.id for one in client.chat.completions.list(metadata=label | {"at": "3"})] == [ids[2]]
    assert client.chat.completions.list(metadata=label, model="other").data == []
    assert len(client.chat.completions.list(metadata=label, model="tiny").data) == 4
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.list(after="chatcmpl-" + 32 * "0")


def test_nothing_is_stored_unasked_or_shown_to_others(
    client: openai.OpenAI, same: httpx.Client, leader: ScriptedLeader
) -> None:
    """Another tenant, a completion without `store`, one that runs, and ids of other kinds: 404 for each."""
    kept, unkept = create(client), client.chat.completions.create(model="tiny", messages=ASK)
    stranger = client.with_options(api_key="another")
    assert kept.id not in [one.id for one in stranger.chat.completions.list()]
    response = client.responses.create(model="tiny", input="hello")
    as_response, as_chat = kept.id.replace("chatcmpl-", "resp_"), response.id.replace("resp_", "chatcmpl-")
    paths = [f"/v1/chat/completions/{one}" for one in (unkept.id, as_chat, "x", "chatcmpl-1")]
    assert [same.get(path).status_code for path in (*paths, f"/v1/responses/{as_response}")] == [404] * 5
    for act in (stranger.chat.completions.retrieve, stranger.chat.completions.delete):
        with pytest.raises(openai.NotFoundError):
            act(kept.id)
    leader.pause()
    stream = create(client, stream=True)
    [running] = [held.rid for held in leader.claimed[-1:]]
    assert same.get(f"/v1/chat/completions/chatcmpl-{running}").status_code == 404
    leader.resume()
    assert list(stream) and same.get(f"/v1/chat/completions/chatcmpl-{running}").status_code == 200


def test_the_end_of_an_answer_stores_it(client: openai.OpenAI, leader: ScriptedLeader, redis_client: Any) -> None:
    """Without a read of it and without a round of the processes, whole and streamed, as it is made from the log."""
    for more in ({}, {"n": 2, "stream": True, "logprobs": True, "top_logprobs": 1}):
        made = create(client, **more)
        chunks = list(made) if "stream" in more else [made]
        rid = chunks[0].id.removeprefix("chatcmpl-")
        assert redis_client.zscore(keys.OPEN_CHATS, f"{rid} {KEYLESS}") is None
        record = OWNED.record(rid)
        body, view = redis_client.hget(record, "response"), redis_client.hget(REQUESTS.request(rid), "view")
        assert body
        redis_client.hdel(record, "response")
        redis_client.hset(record, "view", view)
        client.chat.completions.retrieve(f"chatcmpl-{rid}")
        assert redis_client.hget(record, "response") == body


def test_a_stored_answer_can_be_replayed(client: openai.OpenAI, leader: ScriptedLeader, redis_client: Any) -> None:
    """Without `--keep-requests`, once its own keys are gone: stored with the end of the answer, and from the log."""
    leader.reply = lambda _: "It rains."
    streamed = list(create(client, stream=True, logprobs=True, top_logprobs=1, stop="never"))
    for at, identity in enumerate((streamed[0].id, create(client, n=2, temperature=0.7).id)):
        rid = identity[-32:]
        found = [find_kept(redis_client, ["tiny"], rid)]
        unread(redis_client, identity)
        redis_client.hdel(OWNED.record(rid), "entries")
        client.chat.completions.retrieve(identity)
        log = [entry for page in read_pages(redis_client, "tiny", rid) for entry in page]
        redis_client.delete(REQUESTS.request(rid), REQUESTS.log(rid))
        found.append(find_kept(redis_client, ["tiny"], rid))
        assert [one.entries for one in found] == [log, log]
        assert found[0].params == found[1].params == leader.claimed[at].params
        assert "entries" not in client.chat.completions.retrieve(identity).to_dict()
        client.chat.completions.delete(identity)
        with pytest.raises(RequestNotFound, match="no stored chat"):
            find_kept(redis_client, ["tiny"], rid)


def unread(redis_client: Any, identity: str) -> str:
    """Make a stored answer one that no process has completed; its rid."""
    rid = identity[-32:]
    redis_client.hdel(OWNED.record(rid), "response")
    redis_client.hset(OWNED.record(rid), "view", redis_client.hget(REQUESTS.request(rid), "view"))
    return rid


def test_a_round_stores_what_nobody_read(client: openai.OpenAI, leader: ScriptedLeader, redis_client: Any) -> None:
    """Behind more of them than a page has, and behind one whose look fails in an unexpected way."""
    rid, broken = (unread(redis_client, create(client).id) for _ in range(2))
    redis_client.hset(REQUESTS.request(broken), "view", "{")
    gone = {f"{at:032x} {KEYLESS}": 1 for at in range(1_000)}
    redis_client.zadd(keys.OPEN_CHATS, gone | {f"{broken} {KEYLESS}": 2, f"{rid} {KEYLESS}": 3})
    until(lambda: redis_client.hget(OWNED.record(rid), "response"), 40)
    until(lambda: redis_client.zrange(keys.OPEN_CHATS, 0, -1) == [f"{broken} {KEYLESS}"])
    redis_client.delete(keys.OPEN_CHATS, OWNED.record(broken))


def test_a_model_that_leaves_hides_no_answer(client: openai.OpenAI, leader: ScriptedLeader, redis_client: Any) -> None:
    """While it drains the list is there, with an answer that is only in the log so far."""
    spec = REQUESTS.spec
    rid = unread(redis_client, create(client).id)
    redis_client.copy(spec, "kept", replace=True)
    catalog.tombstone(redis_client, "tiny")
    try:
        until(lambda: not_served(client))
        data = client.chat.completions.list(order="desc", limit=1).data
        assert [one.id for one in data] == [f"chatcmpl-{rid}"]
    finally:
        redis_client.rename("kept", spec)
        until(lambda: not not_served(client))


def test_answers_outlive_their_model(
    client: openai.OpenAI, leader: ScriptedLeader, redis_client: Any, server: Server, tmp_path: Path
) -> None:
    """Those that no process had stored when it was unloaded: the process that served it, and another one, make them."""
    leader.reply = lambda _: "It rains."
    chat, response = create(client).id, client.responses.create(model="tiny", input="hello").id
    spec = catalog.get_spec(redis_client, "tiny")
    assert spec is not None
    redis_client.copy(REQUESTS.spec, "kept", replace=True)
    catalog.forget(redis_client, spec)
    try:
        until(lambda: not_served(client))
        with running_api(server.url, tmp_path) as process:
            other = client.with_options(base_url=f"{process.url}/v1")
            for each in (client, other):
                for identity in (chat, response):
                    unread(redis_client, identity)
                assert each.chat.completions.retrieve(chat).choices[0].message.content == "It rains."
                completion = each.responses.retrieve(response)
                assert (completion.status, completion.output_text) == ("completed", "It rains.")
    finally:
        redis_client.rename("kept", REQUESTS.spec)
        redis_client.rename(REQUESTS.assets_left, REQUESTS.assets)
        redis_client.persist(REQUESTS.assets)
        redis_client.sadd(keys.MODELS, "tiny")
        until(lambda: not not_served(client))


def not_served(client: openai.OpenAI) -> bool:
    try:
        client.chat.completions.create(model="tiny", messages=ASK, max_tokens=1)
    except openai.APIStatusError:
        return True
    return False


def test_a_list_without_matches_has_a_cursor(
    same: httpx.Client, client: openai.OpenAI, leader: ScriptedLeader, redis_client: Any
) -> None:
    """After 5,000 that don't match: the last one looked at, from which the next page goes on to one that matches."""
    first = create(client).id.removeprefix("chatcmpl-")
    tenant = redis_client.hget(OWNED.record(first), "tenant")
    pipe = redis_client.pipeline()
    others = [f"{at:032x}" for at in range(5_000)]
    pipe.zadd(OWNED.chats, {rid: at for at, rid in enumerate(others)})
    pipe.zadd(OWNED.index, dict.fromkeys(others, 2**42))
    for rid in others:
        pipe.hset(OWNED.record(rid), mapping={"tenant": tenant, "model": "m", "view": "", "kind": "chat", "named": "m"})
    pipe.execute()
    try:
        page = same.get("/v1/chat/completions", params={"model": "tiny"}).json()
        assert (page["data"], page["has_more"], page["last_id"]) == ([], True, f"chatcmpl-{others[-1]}")
        rest = same.get("/v1/chat/completions", params={"model": "tiny", "after": page["last_id"]}).json()
        assert f"chatcmpl-{first}" in [one["id"] for one in rest["data"]]
    finally:
        redis_client.delete(*[OWNED.record(rid) for rid in others])
        redis_client.zrem(OWNED.chats, *others)
        redis_client.zrem(OWNED.index, *others)


def test_malformed_labels_are_refused(same: httpx.Client, client: openai.OpenAI, leader: ScriptedLeader) -> None:
    path = f"/v1/chat/completions/{create(client).id}"
    for body in ({}, {"metadata": 5}, {"metadata": {"a": 1}}, {"metadata": {"a": 600 * "x"}}, []):
        refused = same.post(path, json=body)
        assert refused.status_code == 400, refused.text
    assert same.get(path).json()["metadata"] == {}


def test_a_flood_evicts_its_own_tenant_s_alone(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """Ten are kept of each owner; the list has no more, and nothing of them is left in Redis."""
    with running_api(server.url, tmp_path, "--response-number", "10") as process:
        client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
        ids = [create(client).id for _ in range(14)]
        found = [one.id for one in client.chat.completions.list(order="desc", limit=100)]
        assert found == ids[:-11:-1]
        with pytest.raises(openai.NotFoundError, match="10 responses"):
            client.chat.completions.retrieve(ids[0])


def test_a_list_without_a_key_is_this_machine_s(
    same: httpx.Client, server: Server, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """All callers without one would see it: refused through a proxy and beyond loopback. `--response-ttl 0` is told."""
    proxied = same.get("/v1/chat/completions", headers={"x-forwarded-for": "10.0.0.1"})
    assert proxied.status_code == 403 and "furrow keys create" in proxied.text
    with running_api(server.url, tmp_path, "--response-ttl", "0", "--host", "0.0.0.0", "--no-auth") as process:
        body = {"model": "tiny", "messages": ASK, "store": True}
        answer = httpx.post(f"{process.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "stores none" in json.dumps(dict(answer.headers))
        assert httpx.get(f"{process.url}/v1/chat/completions").status_code == 403
