"""An API process that dies leaves no request behind: two of them, one killed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from control import keys
from control.keys import ModelKeys
from control.operations.checks.findings import Finding
from control.redis.connection import connect
from ops.cli.doctor.doctor import examine
from tests.integration.api.conftest import IN_A_HURRY, ApiProcess, running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import NEW, Server, serving
from tests.waiting import until

CHAT = "/v1/chat/completions"
KEYS = ModelKeys("tiny")


@pytest.fixture(scope="module")
def api(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    """Its rounds come every 0.3 seconds."""
    with running_api(server.url, tmp_path_factory.mktemp("api"), constants=IN_A_HURRY) as process:
        yield process


def test_what_nobody_follows_any_more_ends_by_its_policy(
    server: Server, leader: ScriptedLeader, api: ApiProcess, redis_client: Any, tmp_path: Path
) -> None:
    """The other process strikes the dead one off, waits its grace for a resume, then cancels, or lets it go on."""
    leader.pause()
    rids: dict[str, str] = {}
    with running_api(server.url, tmp_path) as doomed, ExitStack() as streams:
        for policy in ("cancel", "continue"):
            body = chat(policy, stream=True, on_disconnect=policy)
            response = streams.enter_context(httpx.stream("POST", f"{doomed.url}{CHAT}", json=body, timeout=40))
            rids[policy] = response.headers["x-request-id"]
        doomed.process.kill()
        doomed.process.wait()

    def states() -> list[str]:
        return [redis_client.hget(KEYS.request(rid), "state") for rid in rids.values()]

    until(lambda: redis_client.zscore(KEYS.orphans, rids["cancel"]), 30)
    assert states() == ["running", "running"]
    assert redis_client.zscore(KEYS.orphans, rids["continue"]) is None
    redis_client.zadd(KEYS.orphans, {rids["cancel"]: 1})  # as if the grace of 30 seconds were over
    until(lambda: states() == ["cancelled", "running"])
    leader.resume()
    until(lambda: states() == ["cancelled", "finished"])


def silent(redis_url: str, url: str) -> list[Finding]:
    """What the doctor says about the API process at an address."""
    return [one for one in examine(redis_url, None) if one.check == "api process" and url in one.message]


def test_the_doctor_tells_a_stopped_api_from_one_that_died(tmp_path: Path) -> None:
    """A stopped one has a port that accepts; each remedy works, and an orderly stop leaves nothing to tell."""
    with serving(NEW) as server, connect(server.url) as client, running_api(server.url, tmp_path) as api:
        until(lambda: client.hlen(keys.API_RECORDS) == 1)
        assert not silent(server.url, api.url)
        api.process.send_signal(signal.SIGSTOP)
        [stopped] = until(lambda: silent(server.url, api.url))
        assert stopped.level == "error" and f"`kill -CONT {api.process.pid}`" in stopped.remedy
        api.process.send_signal(signal.SIGCONT)
        until(lambda: not silent(server.url, api.url))
        api.kill()
        [died] = until(lambda: silent(server.url, api.url))
        assert died.level == "warning" and "it has died" in died.message
        api.start()  # the same address, under another id
        until(lambda: not silent(server.url, api.url))
        api.process.send_signal(signal.SIGTERM)
        api.process.wait(40)
        assert not silent(server.url, "http")
