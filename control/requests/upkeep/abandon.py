"""The end of requests that no leader will end: of a model that is unloaded, or of which every replica was given up."""

from __future__ import annotations

from collections.abc import Iterator

from control.keys import CLASSES, ModelKeys
from control.messages import RequestState
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every

PAGE = 128
"""Requests, or tenants, that are read and ended in one round trip."""


def abandon(
    client: SyncRedis, model: str, cause: str, state: RequestState = "cancelled", most: int | None = None
) -> int:
    """End the model's requests that wait, and those whose replica has no leader; how many ended. Clients get `cause`.

    `most`: stop after about so many, so that a caller with other duties may go on later. Raises RedisUnavailable.
    """
    keys = ModelKeys(model)
    ended = 0
    for rids in _open_requests(client, keys):
        calls = [Call("abandon", (keys.request(rid),), (keys.base, rid, cause, state), int) for rid in rids]
        ended += sum(run_every(client, calls))
        if most is not None and ended >= most:
            break
    return ended


def _open_requests(client: SyncRedis, keys: ModelKeys) -> Iterator[list[str]]:
    """The requests in all queues, delivered ones included, by pages."""

    def entries(reply: list[tuple[str, dict[str, str]]]) -> list[tuple[str, str]]:
        return [(entry, fields["rid"]) for entry, fields in reply]

    for priority in CLASSES:
        # All names first: a tenant leaves the set with its last request.
        tenants: list[str] = []
        while page := run(client, _tenants(keys, priority, len(tenants))):
            tenants += page
        for tenant in tenants:
            after = "-"
            while True:
                queue = keys.queue(priority, tenant)
                waiting = run(client, read("XRANGE", queue, after, "+", "COUNT", PAGE, parse=entries))
                if not waiting:
                    break
                yield [rid for _, rid in waiting]
                after = f"({waiting[-1][0]}"


def _tenants(keys: ModelKeys, priority: str, first: int) -> Call[list[str]]:
    return read("ZRANGE", keys.served(priority), first, first + PAGE - 1, parse=list[str])
