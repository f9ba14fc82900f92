"""Fifty open pages cost Redis the reads of one or two."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from control.placement import membership
from control.placement.placement import Host
from control.redis.clients import SyncRedis
from tests.integration.api.conftest import ApiProcess
from tests.leader import ScriptedLeader

PAGES = (
    ("/farm",),
    ("/farm/hosts",),
    ("/farm/requests",),
    ("/farm/requests?model=tiny&tenant=acme", "/farm/requests/none"),
    ("/farm/dead", "/farm/dead?model=tiny"),
    ("/farm/keys", "/farm/usage?days=30"),
    ("/farm/history?model=tiny", "/farm/models/spec?model=tiny"),
)
CLIENTS = 50


def commands(client: SyncRedis) -> int:
    return int(client.info("stats")["total_commands_processed"])


@pytest.mark.parametrize("paths", PAGES, ids=lambda paths: paths[0])
def test_fifty_pages_cost_what_one_does(
    operator: httpx.Client,
    guarded: ApiProcess,
    redis_client: SyncRedis,
    leader: ScriptedLeader,
    paths: tuple[str, ...],
) -> None:
    """Where all read at once; a second later each read is made anew, once for all."""
    headers = {"authorization": operator.headers["authorization"]}

    def visit(_: int) -> list[int]:
        return [httpx.get(f"{guarded.url}{path}", headers=headers).status_code for path in paths]

    began, before = time.monotonic(), commands(redis_client)
    time.sleep(0.5)
    rest = (commands(redis_client) - before) / (time.monotonic() - began)  # of all processes, a second
    before = commands(redis_client)
    answers = [operator.get(path) for path in paths]
    wanted = [one.status_code for one in answers]
    assert all(one.headers["cache-control"] == "no-store" for one in answers if one.is_success)
    one = commands(redis_client) - before
    began, before = time.monotonic(), commands(redis_client)
    with ThreadPoolExecutor(CLIENTS) as pool:
        assert list(pool.map(visit, range(CLIENTS))) == [wanted] * CLIENTS
    took, spent = time.monotonic() - began, commands(redis_client) - before
    assert spent <= (2 + took) * one + 2 * rest * (took + 1), (one, rest, took, spent)


def test_an_act_is_seen_by_the_next_read(operator: httpx.Client, guarded: ApiProcess, redis_client: SyncRedis) -> None:
    """Although the answer of a moment ago is still young; a change that came another way is seen a second later."""
    membership.beat_host(redis_client, Host("steady"), pid=1, memory_bytes=1)
    headers = {"authorization": operator.headers["authorization"]}

    def drained() -> bool:
        hosts = httpx.get(f"{guarded.url}/farm/hosts", headers=headers).json()["data"]
        return next(host["drained"] for host in hosts if host["id"] == "steady")

    for undo in (False, True) * 3:
        body = {"host": "steady", "undo": undo}
        assert drained() is undo
        assert httpx.post(f"{guarded.url}/farm/hosts/drain", json=body, headers=headers).status_code == 200
        assert drained() is not undo
    membership.drain(redis_client, "steady")
    until = time.monotonic() + 5
    while not drained():
        assert time.monotonic() < until
