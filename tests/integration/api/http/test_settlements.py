"""A key's limits are settled without a follower: for requests that nobody follows any more."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from control import access
from control.access import ApiKey
from control.redis.clients import SyncRedis
from control.redis.connection import run
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

CHAT = "/v1/chat/completions"
TPM, ANSWER = 3_000, 3_000


@pytest.fixture(scope="module")
def guarded(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    """A process that asks for keys."""
    with running_api(server.url, tmp_path_factory.mktemp("guarded"), "--keys") as process:
        yield process


def leave_a_stream(url: str, secret: str) -> tuple[int, str]:
    """Ask for a stream that goes on without its client, and leave it after the first event; status and request id."""
    body = chat("x", stream=True, on_disconnect="continue", max_tokens=ANSWER + 100)
    headers = {"authorization": f"Bearer {secret}"}
    with httpx.stream("POST", f"{url}{CHAT}", json=body, headers=headers, timeout=40) as response:
        if response.status_code == 200:
            next(response.iter_lines())
        return response.status_code, response.headers["x-request-id"]


def settled(redis_client: SyncRedis, key: ApiKey) -> bool:
    return not run(redis_client, access.open_requests(key)) and not run(redis_client, access.pending("tiny"))


def test_streams_that_were_left_count(guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis) -> None:
    """A key of 3,000 tokens a minute can't make 12,000 by leaving its streams: the first one used the minute up."""
    key, secret = access.mint(tpm=TPM, max_concurrent=9)
    access.create(redis_client, key)
    leader.reply = lambda _: "y" * ANSWER
    statuses = list[int]()
    for _ in range(4):
        status, _ = leave_a_stream(guarded.url, secret)
        statuses.append(status)
        until(lambda: settled(redis_client, key), 30)
    assert statuses == [200, 429, 429, 429]


def test_no_api_process_need_be_there(
    server: Server,
    leader: ScriptedLeader,
    redis_client: SyncRedis,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The process that began a stream is killed; the request goes on and ends, and the next process settles it."""
    key, secret = access.mint(tpm=TPM, max_concurrent=1)
    access.create(redis_client, key)
    leader.reply = lambda _: "y" * ANSWER
    leader.pause()
    with running_api(server.url, tmp_path_factory.mktemp("first"), "--keys") as first:
        body = chat("x", stream=True, on_disconnect="continue", max_tokens=ANSWER + 100)
        headers = {"authorization": f"Bearer {secret}"}
        with httpx.stream("POST", f"{first.url}{CHAT}", json=body, headers=headers, timeout=40) as response:
            assert response.status_code == 200
            first.process.kill()
    leader.resume()
    until(lambda: run(redis_client, access.pending("tiny")), 30)
    assert set(run(redis_client, access.open_requests(key))) == {response.headers["x-request-id"]}
    with running_api(server.url, tmp_path_factory.mktemp("second"), "--keys") as second:
        until(lambda: settled(redis_client, key), 30)
        assert leave_a_stream(second.url, secret)[0] == 429
