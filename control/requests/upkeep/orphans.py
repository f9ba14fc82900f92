"""Requests that nobody follows any more: carries out on_disconnect for API processes that have died."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from control import constants, keys
from control.keys import ModelKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Steps, read, run, write

GRACE_MS = 30_000
"""Time for which a request of a dead API process waits for its client to return on another one."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """The requests whose end was asked for; `more` where another call may find some."""

    rids: list[str]
    more: bool


def reap_all(client: SyncRedis, model: str, gone: Sequence[str] = ()) -> list[str]:
    """All batches; the requests whose end was asked for. Raises RedisUnavailable."""
    rids = list[str]()
    more = True
    while more:
        reaped = run(client, reap(model, gone))
        rids += reaped.rids
        more = reaped.more
    return rids


def reap(model: str, gone: Iterable[str] = (), grace_ms: int = GRACE_MS) -> Call[Reaped]:
    """Strike `gone` API processes from requests of the model, and end orphans whose wait is over: a batch of both.

    May run anywhere, any number of times.
    """
    model_keys = ModelKeys(model)

    def parse(reply: list[Any]) -> Reaped:
        rids, more = reply
        return Reaped(rids, bool(more))

    return Call("reap", (model_keys.orphans,), (model_keys.base, grace_ms, *gone), parse)


def take_round(api: str) -> Call[bool]:
    """True if this process makes the next round over all models; one process a second gets it."""
    return write("SET", keys.REAPER_LOCK, api, "NX", "PX", constants.ROUND_MS, parse=bool)


def gone_apis() -> Steps[list[str]]:
    """API processes that have been seen and whose heartbeat has lapsed."""
    [api_ids] = yield [read("SMEMBERS", keys.APIS, parse=sorted)]
    alive = yield [read("EXISTS", keys.api(api_id), parse=bool) for api_id in api_ids]
    return [api_id for api_id, is_alive in zip(api_ids, alive, strict=True) if not is_alive]
