"""Two API processes, one of them killed: what becomes of the requests that it followed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from control.keys import ModelKeys
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

CHAT = "/v1/chat/completions"
KEYS = ModelKeys("tiny")


@pytest.mark.timeout(60)  # a heartbeat lapses in two seconds, and is looked for every five
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
