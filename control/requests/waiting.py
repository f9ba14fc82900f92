"""The oldest requests of a model's queues, and the end of those whose deadline has passed."""

from __future__ import annotations

from control.clients import SyncRedis
from control.connection import read, run_every
from control.keys import CLASSES, ModelKeys
from control.requests.ending import expire

LOOK = 256
"""Entries of one queue that are looked at in one go, oldest first."""


def waiting(client: SyncRedis, model: str) -> list[tuple[str, str]]:
    """(rid, tenant) of the oldest LOOK requests in each queue, those that run included. Raises RedisUnavailable."""
    keys = ModelKeys(model)

    def members(reply: list[str]) -> list[str]:
        return list(reply)

    def rids(reply: list[tuple[str, dict[str, str]]]) -> list[str]:
        return [fields["rid"] for _, fields in reply]

    tenants = run_every(client, [read("ZRANGE", keys.turns(name), 0, -1, parse=members) for name in CLASSES])
    queues = [(name, tenant) for name, found in zip(CLASSES, tenants, strict=True) for tenant in found]
    reads = [read("XRANGE", keys.queue(*queue), "-", "+", "COUNT", LOOK, parse=rids) for queue in queues]
    found = run_every(client, reads)
    return [(rid, tenant) for (_, tenant), some in zip(queues, found, strict=True) for rid in some]


def expire_waiting(client: SyncRedis, model: str) -> int:
    """End the waiting requests whose deadline has passed, which no leader may be there to do; how many."""
    outcomes = run_every(client, [expire(model, rid) for rid, _ in waiting(client, model)])
    return outcomes.count("expired")
