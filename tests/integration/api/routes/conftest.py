"""An API process that asks for keys, and its operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control import access
from control.redis.clients import SyncRedis
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import Server


@pytest.fixture(scope="module")
def guarded(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    with running_api(server.url, tmp_path_factory.mktemp("guarded"), "--keys", "--api-key", "fixed") as process:
        yield process


def make(client: SyncRedis, **fields: Any) -> str:
    key, secret = access.mint(**fields)
    access.create(client, key)
    return secret


@pytest.fixture
def operator(guarded: ApiProcess, redis_client: SyncRedis) -> Iterator[httpx.Client]:
    """Speaks with an operator's key, and takes no answer that was made for another."""
    headers = {"authorization": f"Bearer {make(redis_client, admin=True)}", "cache-control": "no-cache"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=40) as client:
        yield client
