"""Requests that nobody follows any more: carries out on_disconnect for API processes that have died."""

from __future__ import annotations

from collections.abc import Iterable

from control import keys
from control.clients import SyncRedis
from control.connection import Call, read, run, run_all
from control.keys import ModelKeys

GRACE_MS = 30_000
"""How long a request of a dead API process waits for its client to come back on another one."""


def reap(model: str, gone: Iterable[str] = (), grace_ms: int = GRACE_MS) -> Call[list[str]]:
    """Strike the `gone` API processes from every request of the model, and end the orphans whose wait is over.

    Returns the rids whose end was asked for. May run anywhere, any number of times.
    """
    model_keys = ModelKeys(model)

    def parse(reply: list[str]) -> list[str]:
        return reply

    return Call("reap", (model_keys.orphans,), (model_keys.base, grace_ms, *gone), parse)


def gone_apis(client: SyncRedis) -> list[str]:
    """API processes that have been seen and whose heartbeat has lapsed."""

    def members(reply: Iterable[str]) -> list[str]:
        return sorted(reply)

    known = run(client, read("SMEMBERS", keys.APIS, parse=members))
    alive = run_all(client, [read("EXISTS", keys.api(api_id), parse=bool) for api_id in known])
    return [api_id for api_id, is_alive in zip(known, alive, strict=True) if is_alive is False]
