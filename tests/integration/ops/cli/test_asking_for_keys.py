"""`furrow api` asks for keys on a public address."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from control.redis.clients import connect
from tests.integration.api.conftest import running_api
from tests.servers import Server


def test_where_others_can_reach_it_a_key_is_asked_for(new_server: Server, tmp_path: Path) -> None:
    """And the operator is told why, and how to make one."""
    connect(new_server.url).flushall()  # keys of other tests
    with running_api(new_server.url, tmp_path, "--host", "0.0.0.0") as api:
        assert httpx.get(f"{api.url}/v1/models").status_code == 401
        text = api.log.read_text()
        assert "0.0.0.0 can be reached from elsewhere" in text and "`furrow keys create`" in text


def test_fixed_keys_from_the_environment(new_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word of the variable opens the process, and no log tells it."""
    monkeypatch.setenv("FURROW_API_KEYS", "first second")
    with running_api(new_server.url, tmp_path) as api:
        for secret, status in (("first", 200), ("second", 200), ("first second", 401), ("", 401)):
            headers = {"x-api-key": secret} if secret else {}
            assert httpx.get(f"{api.url}/v1/models", headers=headers).status_code == status, secret
        assert "second" not in api.log.read_text()
