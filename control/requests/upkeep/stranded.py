"""The end of requests that no leader will end, and of requests that nobody follows any more.

No leader ends a request of a model that is unloaded (`abandon`), or of which every replica was given up
(`StrandedRequests`). Nobody follows a request whose API process has died (`reap`): its on_disconnect is carried out.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from control import constants, keys
from control.errors import ModelUnavailable
from control.keys import CLASSES, ModelKeys
from control.messages import ModelSpec, RequestState
from control.placement.rollout import in_order
from control.redis.clients import SyncRedis
from control.redis.connection import Call, Steps, read, run, run_every, write
from control.replicas import health
from control.replicas.health import Status

log = structlog.get_logger()


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


GRACE_MS = 30_000
"""Time for which a request of a dead API process waits for its client to return on another one."""


@dataclass(frozen=True, slots=True)
class Reaped:
    """The requests whose end was requested; `more` if another call may find some."""

    rids: list[str]
    more: bool


def reap_all(client: SyncRedis, model: str, gone: Sequence[str] = ()) -> list[str]:
    """All batches; the requests whose end was requested. Raises RedisUnavailable."""
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


LOOK_EVERY_S = 1.0
UNPLACED_S = 30.0
"""If fewer replicas exist than are wanted, a host that comes back may still take one; requests wait for it so long."""
MOST_A_LOOK = 2_000
"""Requests that are ended in one look: the caller has other duties."""


def given_up(statuses: Mapping[str, Status | None]) -> str | None:
    """The cause for which a model with these replicas can't serve: the first one's; None while one may come to
    serve."""
    replicas = [(name, statuses[name]) for name in in_order(statuses)]
    if not replicas or any(status is None or status.state != "failed" for _, status in replicas):
        return None
    name, status = replicas[0]
    assert status is not None
    more = f" (and {len(replicas) - 1} more)" if len(replicas) > 1 else ""
    return f"replica {name}{more} was given up: {status.detail}"


class StrandedRequests:
    """Ends requests of models of which every replica was given up.

    The holder of the placement lock calls `end` in every turn, API processes call it while nobody has the lock. It asks
    Redis once a second at most. Two callers that do the same work are harmless.
    """

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        self._looked = 0.0
        self._since: dict[str, float] = {}
        """The time at which a model was first seen without a replica that may serve."""

    def end(self, specs: Sequence[ModelSpec], replicas: Mapping[str, Sequence[str]]) -> None:
        """End what is open of the models of which all `replicas`, by model, were given up.

        Raises RedisUnavailable.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        serving = [spec for spec in specs if not spec.unload]
        places = [(spec.name, replica) for spec in serving for replica in replicas.get(spec.name, ())]
        statuses = dict(
            zip(places, run_every(self._client, [health.status_of(*place) for place in places]), strict=True)
        )
        causes = {
            spec.name: given_up({replica: statuses[spec.name, replica] for replica in replicas.get(spec.name, ())})
            for spec in serving
        }
        self._since = {name: self._since.get(name, now) for name, cause in causes.items() if cause is not None}
        for spec in serving:
            cause = causes[spec.name]
            missing = spec.least_replicas > len(replicas.get(spec.name, ()))
            if cause is None or (missing and now - self._since[spec.name] < UNPLACED_S):
                continue
            message = str(ModelUnavailable(spec.name, "failed", cause))
            if ended := abandon(self._client, spec.name, message, "finished", MOST_A_LOOK):
                log.error(
                    "requests of a failed model ended",
                    model=spec.name,
                    requests=ended,
                    error=cause,
                    action="end_requests",
                )
