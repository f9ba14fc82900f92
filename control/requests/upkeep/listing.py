"""The requests of a model that have not ended, for an operator: whose they are, where they are, how long they take."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from control.clock import now_ms
from control.keys import CLASSES, ModelKeys
from control.messages import RequestState
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every
from control.requests.ending import cancel
from control.requests.upkeep import facts
from control.requests.upkeep.life import bare_id, find

_PAGE = 16
"""Entries of a queue that are read in one go."""
_FIELDS = ("t_enqueued", "ticket", *facts.FIELDS)


class OpenRequest(facts.RequestFacts, frozen=True, kw_only=True):
    """`age_ms` counts from its enqueueing. `position` is its place in the order of arrival, from 1; None once it runs,
    and only then it has a `replica`."""

    age_ms: int
    position: int | None


def open_requests(client: SyncRedis, models: Sequence[str], limit: int, tenant: str | None = None) -> list[OpenRequest]:
    """Up to `limit` requests of these models that wait or run, oldest first; `tenant`: only its own.

    Raises RedisUnavailable.
    """
    claimed = run_every(client, [read("HGET", ModelKeys(model).load, "claimed", parse=_count) for model in models])
    left = dict(zip(models, claimed, strict=True))
    now = now_ms()
    oldest = _oldest(client, models, limit, tenant)
    requests = run_every(client, [_look(model, rid, now, left[model]) for model, rid in oldest])
    living = [one for one in requests if one is not None and one.state in ("queued", "running")]
    return sorted(living, key=lambda one: -one.age_ms)


def _oldest(client: SyncRedis, models: Sequence[str], limit: int, tenant: str | None) -> list[tuple[str, str]]:
    """Model and id of the requests that joined a queue first, those that run included: a merge of all queues, read in
    pages."""
    classes = [(ModelKeys(model), name) for model in models for name in CLASSES]
    tenants = run_every(client, [read("ZRANGE", keys.served(name), 0, -1, parse=list) for keys, name in classes])
    queues = [
        (keys.model, keys.queue(name, one))
        for (keys, name), names in zip(classes, tenants, strict=True)
        for one in names
        if tenant in (None, one)
    ]
    pages = run_every(client, [_page(queue, "-") for _, queue in queues])
    heads = [(*page[0], *queue, page[1:]) for queue, page in zip(queues, pages, strict=True) if page]
    heapq.heapify(heads)
    oldest = list[tuple[str, str]]()
    while heads and len(oldest) < limit:
        joined, rid, model, queue, rest = heads[0]
        oldest.append((model, rid))
        rest = rest or run(client, _page(queue, f"({'-'.join(map(str, joined))}"))
        if rest:
            heapq.heapreplace(heads, (*rest[0], model, queue, rest[1:]))
        else:
            heapq.heappop(heads)
    return oldest


def _page(queue: str, after: str) -> Call[list[tuple[tuple[int, ...], str]]]:
    """The next entries of a queue: the parts of each id, and the request."""

    def parse(reply: list[tuple[str, dict[str, str]]]) -> list[tuple[tuple[int, ...], str]]:
        return [(tuple(map(int, entry.split("-"))), fields["rid"]) for entry, fields in reply]

    return read("XRANGE", queue, after, "+", "COUNT", _PAGE, parse=parse)


def cancel_any(client: SyncRedis, models: list[str], rid: str) -> RequestState:
    """End a request whosever it is, as an operator may, by its id or that of its answer. Raises RequestNotFound."""
    rid = bare_id(rid)
    model, fields = find(client, models, rid, ("state", "tenant"))
    return run(client, cancel(model, rid, fields["tenant"], "cancelled by the operator"))


def _look(model: str, rid: str, now: int, claimed: int) -> Call[OpenRequest | None]:
    def parse(reply: list[str | None]) -> OpenRequest | None:
        fields = facts.named(_FIELDS, reply)
        if not fields["t_enqueued"]:
            return None
        request = facts.facts_of(model, rid, fields)
        if request["state"] != "running":
            request["replica"] = ""
        return OpenRequest(
            **request,
            age_ms=max(0, now - int(fields["t_enqueued"])),
            position=max(1, int(fields["ticket"] or 0) - claimed) if request["state"] == "queued" else None,
        )

    return read("HMGET", ModelKeys(model).request(rid), *_FIELDS, parse=parse)


def _count(reply: str | None) -> int:
    return int(reply or 0)
