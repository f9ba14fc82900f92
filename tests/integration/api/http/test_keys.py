"""API keys over HTTP: who gets in, what each may do, and that nobody sees what is another's."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from control import access
from control.access import ApiKey
from control.keys import KeyKeys
from control.redis.clients import SyncRedis
from control.redis.connection import run
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat, read_all, text_of
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def guarded(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    """A process that asks for keys, and one fixed key that opens it."""
    with running_api(server.url, tmp_path_factory.mktemp("guarded"), "--keys", "--api-key", "fixed") as process:
        yield process


Mint = Callable[..., tuple[ApiKey, str]]


@pytest.fixture
def mint(redis_client: SyncRedis) -> Mint:
    """Creates a key in the farm."""

    def make(**fields: Any) -> tuple[ApiKey, str]:
        key, secret = access.mint(**fields)
        access.create(redis_client, key)
        return key, secret

    return make


def ask(api: ApiProcess, secret: str, text: str = "x", **fields: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    return httpx.post(f"{api.url}{CHAT}", json=chat(text, **fields), headers=headers, timeout=40)


def official(api: ApiProcess, secret: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key=secret, max_retries=0, timeout=40)


def test_a_key_of_the_farm_or_a_fixed_one_is_accepted(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """A key of the farm or a fixed one, as bearer token or as x-api-key; nobody else, and probes need none."""
    _, secret = mint()
    assert ask(guarded, secret).status_code == ask(guarded, "fixed").status_code == 200
    assert httpx.post(f"{guarded.url}{CHAT}", json=chat("x"), headers={"x-api-key": secret}).status_code == 200
    for wrong in ("", "other", "fk-000000000000-" + "x" * 43, secret[:-1] + ("a" if secret[-1] != "a" else "b")):
        refused = ask(guarded, wrong)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), wrong
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/v1/models/tiny", "/v1/requests/x", "/v1/requests/x/events"):
        assert httpx.get(f"{guarded.url}{path}").status_code == 401, path
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(f"{guarded.url}{path}", timeout=40).status_code == 200, path
    assert secret not in guarded.log.read_text()


def test_the_official_client_is_told_apart(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """It raises its own errors for a wrong key, and answers with a right one."""
    with official(guarded, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with official(guarded, mint()[1]) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]


def test_prefixes_are_shared_within_a_tenant_and_beyond_it_where_the_operator_says_so(
    guarded: ApiProcess,
    mint: Mint,
    leader: ScriptedLeader,
    server: Server,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """By the salt that reaches the leader, whatever the client's own says: it tells one scope from another."""
    secrets = {tenant: mint(tenant=tenant)[1] for tenant in ("a", "b", "c")}
    secrets["a again"] = mint(tenant="a")[1]

    def salts(api: ApiProcess, **fields: Any) -> dict[str, str]:
        leader.claimed.clear()
        for secret in secrets.values():
            assert ask(api, secret, **fields).status_code == 200
        return dict(zip(secrets, [claimed.params.cache_salt for claimed in leader.claimed], strict=True))

    alone = salts(guarded)
    assert alone["a"] == alone["a again"] and len(set(alone.values())) == 3
    named = salts(guarded, cache_salt=alone["a"])
    assert len(set(named.values()) | set(alone.values())) == 6
    with running_api(server.url, tmp_path_factory.mktemp("sharing"), "--keys", "--share-prefixes", "a,b") as sharing:
        shared = salts(sharing)
    assert shared["a"] == shared["b"] == shared["a again"]
    assert shared["c"] == alone["c"] and shared["a"] != alone["a"]


def test_a_revoked_key_is_out_within_seconds(
    guarded: ApiProcess, mint: Mint, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """And so is an expired one; a changed limit is known as soon."""
    key, secret = mint()
    assert ask(guarded, secret).status_code == 200
    for life in (2, 4, 8, 16):  # a machine that stands still may find a key expired before its first use
        expiring, passing = mint(expires=int(time.time()) + life)
        if ask(guarded, passing).status_code == 200:
            break
    else:
        raise AssertionError("no key was valid before it expired")
    access.revoke(redis_client, key)
    until(lambda: ask(guarded, secret).status_code == 401, 20)
    until(lambda: ask(guarded, passing).status_code == 401, 20 + life)
    assert expiring.id in ask(guarded, passing).json()["error"]["message"]


def test_two_keys_see_nothing_of_each_other(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """Status, events and cancelling of another's request are a 404; keys of one tenant share all that."""
    (_, ada), (_, eve), (_, ann) = mint(tenant="one"), mint(), mint(tenant="one")
    rid = ask(guarded, ada, "hello").headers["x-request-id"]
    with httpx.Client(base_url=guarded.url, timeout=40) as client:
        for path in (f"/v1/requests/{rid}", f"/v1/requests/{rid}/events"):
            assert client.get(path, headers={"x-api-key": eve}).status_code == 404
            assert client.get(path, headers={"x-api-key": ann}).status_code == 200
        assert client.delete(f"/v1/requests/{rid}", headers={"x-api-key": eve}).status_code == 404
        with client.stream("GET", f"/v1/requests/{rid}/events", headers={"x-api-key": ada}) as response:
            assert text_of(read_all(response)) == "you said hello"


def test_no_header_sets_an_identity(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """The tenant is the key's, whatever a client claims."""
    key, secret = mint()
    claims = {"x-tenant": "root", "x-forwarded-user": "root", "openai-organization": "root", "x-account": "root"}
    response = httpx.post(f"{guarded.url}{CHAT}", json=chat("x"), headers={"x-api-key": secret, **claims})
    assert response.status_code == 200
    assert leader.claimed[-1].tenant == key.tenant == key.id


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/v1/chat/completions/input_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_every_endpoint_asks_for_a_key_that_opens_the_model(
    guarded: ApiProcess, mint: Mint, leader: ScriptedLeader, path: str, body: dict[str, Any]
) -> None:
    """401 without one, 404 with one for other models; where it generates, the answer tells what the key has left."""
    url, request_body = f"{guarded.url}{path}", {"model": "tiny", **body}
    assert httpx.post(url, json=request_body).status_code == 401
    elsewhere, here = mint(models=["elsewhere"])[1], mint(models=["tiny"], tpm=9000)[1]
    assert httpx.post(url, json=request_body, headers={"x-api-key": elsewhere}).status_code == 404
    answer = httpx.post(url, json=request_body, headers={"x-api-key": here}, timeout=40)
    assert answer.status_code == 200
    generates = path in ("/v1/completions", "/v1/responses", "/v1/messages")
    assert ("x-ratelimit-remaining-tokens" in answer.headers) == generates
    assert ("anthropic-ratelimit-tokens-remaining" in answer.headers) == (path == "/v1/messages")


def test_a_key_opens_its_models_only(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """Any other is not there for it, in the list neither."""
    _, secret = mint(models=["elsewhere"])
    refused = ask(guarded, secret)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    headers = {"x-api-key": secret}
    assert httpx.get(f"{guarded.url}/v1/models", headers=headers).json()["data"] == []
    assert httpx.get(f"{guarded.url}/v1/models/tiny", headers=headers).status_code == 404


def test_a_priority_has_its_cap(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """A class above the key's best is refused by name; without one a request gets the key's best, up to normal."""
    _, secret = mint(priority_cap="low")
    assert ask(guarded, secret, priority="normal").json()["error"]["param"] == "priority"
    assert ask(guarded, secret).status_code == 200
    assert leader.claimed[-1].priority == "low"


def test_a_request_beyond_the_limit_is_a_rate_limit_error(
    guarded: ApiProcess, mint: Mint, leader: ScriptedLeader
) -> None:
    """Every answer tells what is left; the one too many is a RateLimitError that says when to come back."""
    _, secret = mint(rpm=2)
    with official(guarded, secret) as client:
        messages: Any = [{"role": "user", "content": "x"}]
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=messages)
        assert (raw.headers["x-ratelimit-limit-requests"], raw.headers["x-ratelimit-remaining-requests"]) == ("2", "1")
        assert 29 < float(raw.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert "x-ratelimit-limit-tokens" not in raw.headers
        with client.chat.completions.with_streaming_response.create(
            model="tiny", messages=messages, stream=True
        ) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "0"
            stream.read()
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(model="tiny", messages=messages)
    assert refused.value.code == "rate_limit_exceeded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"


def test_what_is_left_in_anthropic_s_words(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """Their client finds limit, rest, the moment of the reset and the request's id, with a refusal and a stream too."""
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    _, secret = mint(rpm=1)
    request_body: Any = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    began = time.time()
    with anthropic.Anthropic(base_url=guarded.url, api_key=secret, max_retries=0, timeout=40) as client:
        with client.messages.stream(**request_body) as stream:
            first = stream.response.headers
            stream.get_final_message()
        with pytest.raises(anthropic.RateLimitError) as refused:
            client.messages.create(**request_body)
    again = refused.value.response.headers
    for headers in (first, again):
        named = [headers[f"anthropic-ratelimit-requests-{what}"] for what in ("limit", "remaining")]
        assert named == ["1", "0"]
        reset = datetime.datetime.fromisoformat(headers["anthropic-ratelimit-requests-reset"])
        assert began + 50 < reset.timestamp() <= time.time() + 62
        assert headers["request-id"] == headers["x-request-id"]
    assert 1 <= int(again["retry-after"]) <= 60
    assert refused.value.body["request_id"] == again["request-id"]


def test_tokens_per_minute_are_what_was_used(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """An estimate is taken first, the truth stays; a prompt beyond the limit can never pass and is told so."""
    _, secret = mint(tpm=1000)
    first = ask(guarded, secret, max_tokens=800)
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 200
    used = first.json()["usage"]["total_tokens"]
    until(lambda: int(ask(guarded, secret, max_tokens=1).headers.get("x-ratelimit-remaining-tokens", 0)) > 900, 40)
    assert used < 50
    refused = ask(guarded, secret, "y" * 1200)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_exceeds_limit")


def test_requests_at_one_time(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """A place is free once its request ends, also if the client left and another process would have had to say so."""
    _, secret = mint(max_concurrent=1)
    leader.pause()
    headers = {"x-api-key": secret}
    body = chat("x", stream=True)
    with (
        httpx.Client(base_url=guarded.url, timeout=40) as client,
        client.stream("POST", CHAT, json=body, headers=headers) as response,
    ):
        assert response.status_code == 200
        refused = ask(guarded, secret)
        assert (refused.status_code, "at one time" in refused.json()["error"]["message"]) == (429, True)
        leader.resume()
        response.read()
    until(lambda: ask(guarded, secret).status_code == 200, 40)


def test_places_that_a_dead_process_left_are_free(
    guarded: ApiProcess, mint: Mint, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """Those of requests that have ended, or never came to the queue; one that is about to come keeps its place."""
    key, secret = mint(max_concurrent=3)
    ended = ask(guarded, secret).headers["x-request-id"]
    until(lambda: not run(redis_client, access.open_requests(key)), 40)
    for rid in (ended, "never-came", "about-to-come"):
        run(redis_client, access.spend(key, rid, "tiny", {rid: 5}))
    long_ago = int(redis_client.time()[0] * 1000) - 60_000
    redis_client.hset(KeyKeys(key.id).open, "never-came", f"{long_ago} tiny")
    assert ask(guarded, secret).status_code == 200
    until(lambda: set(run(redis_client, access.open_requests(key))) == {"about-to-come"}, 40)


def test_what_was_refused_counts_nothing(guarded: ApiProcess, mint: Mint, leader: ScriptedLeader) -> None:
    """A bad body takes nothing of a limit."""
    _, secret = mint(rpm=5)
    for _ in range(7):
        assert ask(guarded, secret, temperature=9).status_code == 400
    assert ask(guarded, secret).headers["x-ratelimit-remaining-requests"] == "4"


def test_a_key_outlives_the_loss_of_redis(
    guarded: ApiProcess, mint: Mint, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """A process that has met it writes it back; what nobody has met is gone."""
    key, secret = mint(rpm=1000)
    _, never_used = mint()
    assert ask(guarded, secret).status_code == 200
    until(lambda: any(found.id == key.id and used for found, used in access.list_keys(redis_client)), 40)
    redis_client.flushall()
    until(lambda: [found for found, _ in access.list_keys(redis_client) if found == key], 40)
    until(lambda: ask(guarded, secret).status_code == 200, 20)
    assert ask(guarded, never_used).status_code == 401
