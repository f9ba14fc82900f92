"""Stored responses have a quota per tenant; and one for all callers without a key; nobody fills Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from api.http.gate import tenant_of
from control import keys
from control.records.responses import KEYLESS
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import Server

BYTES, NUMBER = 200_000, 5
QUOTA = ("--response-bytes", str(BYTES), "--response-number", str(NUMBER))


def body(text: str = "x", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": text, "max_output_tokens": 1, **fields}


def client_of(api: ApiProcess, secret: str) -> httpx.Client:
    return httpx.Client(base_url=api.url, headers={"authorization": f"Bearer {secret}"}, timeout=40)


def create(client: httpx.Client, text: str = "x", **fields: Any) -> str:
    response = client.post("/v1/responses", json=body(text, **fields))
    assert response.status_code == 200, response.text
    return response.json()["id"]


@pytest.fixture(scope="module")
def keyed(server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A process that asks for a key."""
    folder = tmp_path_factory.mktemp("keyed")
    with running_api(server.url, folder, *QUOTA, "--api-key", "one", "--api-key", "two") as process:
        yield process


def test_the_oldest_of_the_same_tenant_go(keyed: ApiProcess, leader: ScriptedLeader) -> None:
    """A tenant's new responses push out its own oldest, with an error that names the quota, and no other tenant's."""
    with client_of(keyed, "one") as one, client_of(keyed, "two") as two:
        of_two = create(two)
        stored = [create(one) for _ in range(NUMBER + 3)]
        statuses = [one.get(f"/v1/responses/{identity}").status_code for identity in stored]
        assert statuses == [404] * 3 + [200] * NUMBER
        refused = one.get(f"/v1/responses/{stored[0]}").json()["error"]
        assert refused["code"] == "response_not_found"
        assert (
            stored[0] in refused["message"] and "quota" in refused["message"] and f"{NUMBER} resp" in refused["message"]
        )
        assert two.get(f"/v1/responses/{of_two}").status_code == 200


def test_a_conversation_in_use_stays_and_one_that_lost_a_part_says_so(
    keyed: ApiProcess, leader: ScriptedLeader
) -> None:
    """Continuing a conversation renews all of it; without an ancestor it can't go on, and the error names that one."""
    with client_of(keyed, "one") as one:
        first = create(one, "first")
        second = create(one, "second", previous_response_id=first)
        for _ in range(NUMBER):
            create(one)
            second = create(one, "more", previous_response_id=first)
        for _ in range(NUMBER - 1):
            create(one)
        refused = one.post("/v1/responses", json=body("third", previous_response_id=second))
        assert refused.status_code == 404
        error = refused.json()["error"]
        assert error["param"] == "previous_response_id" and first in error["message"] and "quota" in error["message"]


def long_input(size: int) -> dict[str, Any]:
    """A conversation far larger than the context: what is too much is not computed, but stored."""
    old = [{"role": role, "content": "y" * (size // 10)} for _ in range(5) for role in ("user", "assistant")]
    return {"input": [*old, {"role": "user", "content": "x"}], "truncation": "auto"}


def test_the_bytes_count_inputs_options_and_answers(
    keyed: ApiProcess, leader: ScriptedLeader, redis_client: Any
) -> None:
    """The owner's bytes stay within the quota; what can never fit is refused before it is queued."""
    sizes = keys.ResponseKeys(tenant_of("two")).sizes
    with client_of(keyed, "two") as two:
        for _ in range(8):
            create(two, **long_input(60_000))
            assert 60_000 < int(redis_client.hget(sizes, "total")) <= BYTES
        claimed = len(leader.claimed)
        tool = {"type": "function", "name": "f", "description": "d" * BYTES}
        for large in (long_input(BYTES), {"instructions": "z" * BYTES}, {"tools": [tool]}):
            refused = two.post("/v1/responses", json=body(**large))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "store"), refused.text
            assert "'store': false" in refused.json()["error"]["message"]
        assert len(leader.claimed) == claimed
        assert two.post("/v1/responses", json=body(**long_input(BYTES), store=False)).status_code == 200


async def test_hundreds_of_secrets_without_a_key_share_one_quota(
    server: Server, leader: ScriptedLeader, tmp_path: Path, redis_client: Any
) -> None:
    """Made-up secrets get no more room than one: in Redis there are never more records than the quota allows."""
    named = keys.ResponseKeys(KEYLESS)
    with running_api(server.url, tmp_path, "--response-bytes", "1000000", "--response-number", "50") as process:
        limits = httpx.Limits(max_connections=16)
        async with httpx.AsyncClient(base_url=process.url, timeout=60, limits=limits) as client:

            async def store(index: int) -> int:
                fields = long_input(20_000) if index % 50 == 0 else {}
                secret = {"authorization": f"Bearer made-up-{index}"}
                asked = body(**fields, background=index % 2 == 0)
                return (await client.post("/v1/responses", json=asked, headers=secret)).status_code

            statuses = await asyncio.gather(*(store(index) for index in range(400)))
        assert set(statuses) == {200}
        assert redis_client.zcard(named.index) <= 50
        assert int(redis_client.hget(named.sizes, "total")) <= 1_000_000
        assert len(list(redis_client.scan_iter(named.record("*"), count=1000))) <= 50


def test_a_chain_is_stored_once(http: httpx.Client, leader: ScriptedLeader, redis_client: Any) -> None:
    """Each response of a conversation keeps its own input and a reference: the bytes grow with what is new alone."""
    named = keys.ResponseKeys(KEYLESS)
    text, previous = "w" * 100, ""
    sizes: list[int] = []
    for _ in range(12):
        previous = create(http, text, **({"previous_response_id": previous} if previous else {}))
        sizes.append(int(redis_client.hget(named.sizes, previous.removeprefix("resp_"))))
    assert max(sizes[1:]) - min(sizes[1:]) < 100
    record = redis_client.hgetall(named.record(previous.removeprefix("resp_")))
    assert msgspec.json.decode(record["input"])[0]["content"][0]["text"] == text
