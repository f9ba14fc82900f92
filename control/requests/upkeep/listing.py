"""The requests of a model that have not ended, for an operator: whose they are, where they are, how long they take."""

from __future__ import annotations

import heapq
from typing import Any

import msgspec

from control.clock import now_ms
from control.errors import RequestNotFound
from control.keys import CLASSES, ModelKeys
from control.messages import RequestState
from control.redis.clients import SyncRedis
from control.redis.connection import Call, optional_text, read, run, run_every
from control.requests.ending import cancel

_PAGE = 16
"""Entries of a queue that are read in one go."""
_COUNTS = ("attempts", "prompt_tokens", "seq", "tokenless")
_FIELDS = ("state", "tenant", "account", "priority", "replica", "cancel", *_COUNTS)


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`age_ms` counts from its enqueueing; `key` is what its usage is counted under; `replica` has it while it runs."""

    id: str
    model: str
    state: str
    tenant: str
    key: str
    priority: str
    age_ms: int
    prompt_tokens: int
    completion_tokens: int
    attempts: int
    replica: str
    cancelled: bool
    """It was asked to end, and does so with its next step."""


def open_requests(client: SyncRedis, model: str, limit: int) -> list[OpenRequest]:
    """Up to `limit` requests that wait or run, oldest first. Raises RedisUnavailable."""
    keys = ModelKeys(model)
    found = run_every(client, [_look(model, rid, now_ms()) for rid in _oldest(client, keys, limit)])
    living = [one for one in found if one is not None and one.state in ("queued", "running")]
    return sorted(living, key=lambda one: -one.age_ms)[:limit]


def _oldest(client: SyncRedis, keys: ModelKeys, limit: int) -> list[str]:
    """The requests that joined a queue first, those that run included: a merge of all queues, read in pages."""
    tenants = run_every(client, [read("ZRANGE", keys.served(name), 0, -1, parse=list) for name in CLASSES])
    queues = [keys.queue(name, tenant) for name, found in zip(CLASSES, tenants, strict=True) for tenant in found]
    pages = run_every(client, [_page(queue, "-") for queue in queues])
    heads = [(*page[0], queue, page[1:]) for queue, page in zip(queues, pages, strict=True) if page]
    heapq.heapify(heads)
    rids = list[str]()
    while heads and len(rids) < limit:
        joined, rid, queue, rest = heads[0]
        rids.append(rid)
        rest = rest or run(client, _page(queue, f"({'-'.join(map(str, joined))}"))
        if rest:
            heapq.heapreplace(heads, (*rest[0], queue, rest[1:]))
        else:
            heapq.heappop(heads)
    return rids


def _page(queue: str, after: str) -> Call[list[tuple[tuple[int, ...], str]]]:
    """The next entries of a queue: the parts of each id, and the request."""

    def parse(reply: list[tuple[str, dict[str, str]]]) -> list[tuple[tuple[int, ...], str]]:
        return [(tuple(map(int, entry.split("-"))), fields["rid"]) for entry, fields in reply]

    return read("XRANGE", queue, after, "+", "COUNT", _PAGE, parse=parse)


def cancel_any(client: SyncRedis, models: list[str], rid: str) -> RequestState:
    """End a request whosever it is, as an operator may. Raises RequestNotFound."""
    asked = [read("HGET", ModelKeys(model).request(rid), "tenant", parse=optional_text) for model in models]
    owners = run_every(client, asked)
    for model, tenant in zip(models, owners, strict=True):
        if tenant is not None:
            [state] = run_every(client, [cancel(model, rid, tenant, "cancelled by the operator")])
            return state
    raise RequestNotFound(f"No request {rid!r} in any model. It may have ended more than its retention ago.")


def _look(model: str, rid: str, now: int) -> Call[OpenRequest | None]:
    def parse(reply: list[str | None]) -> OpenRequest | None:
        since, *values = reply
        if since is None:
            return None
        fields: dict[str, Any] = {name: value or "" for name, value in zip(_FIELDS, values, strict=True)}
        attempts, prompt_tokens, seq, tokenless = (int(fields[name] or 0) for name in _COUNTS)
        return OpenRequest(
            id=rid,
            model=model,
            state=fields["state"],
            tenant=fields["tenant"],
            key=fields["account"],
            priority=fields["priority"],
            age_ms=max(0, now - int(since)),
            replica=fields["replica"] if fields["state"] == "running" else "",
            cancelled=fields["cancel"] == "1",
            attempts=attempts,
            prompt_tokens=prompt_tokens,
            completion_tokens=seq - tokenless,
        )

    return read("HMGET", ModelKeys(model).request(rid), "t_enqueued", *_FIELDS, parse=parse)
