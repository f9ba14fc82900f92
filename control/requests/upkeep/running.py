"""Requests as an operator sees them: lists of those that have not ended, and the life of one, with its phases, the
epochs that had it, and the faults that it met.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from control.clock import now_ms
from control.errors import RequestNotFound
from control.keys import CLASSES, ModelKeys
from control.messages import RequestState
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every
from control.replicas import health
from control.requests.ending import cancel

_COUNTS = ("attempts", "prompt_tokens", "seq", "tokenless")
_TEXTS = ("state", "tenant", "account", "priority", "replica", "cancel")
FIELDS = (*_TEXTS, *_COUNTS)


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`key` is what the request's usage is counted under; `replica` has it, or had it last."""

    id: str
    model: str
    state: str
    tenant: str
    key: str
    priority: str
    replica: str
    attempts: int
    prompt_tokens: int
    completion_tokens: int
    cancelled: bool
    """It was asked to end, and does so with its next step."""


def named(names: Sequence[str], reply: Sequence[str | None]) -> dict[str, str]:
    """The fields of an HMGET by name, "" for those that are not there."""
    return {name: value or "" for name, value in zip(names, reply, strict=True)}


def facts_of(model: str, rid: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of a RequestFacts. `fields` has all of FIELDS."""
    attempts, prompt_tokens, seq, tokenless = (int(fields[name] or 0) for name in _COUNTS)
    return {
        "id": rid,
        "model": model,
        "state": fields["state"],
        "tenant": fields["tenant"],
        "key": fields["account"],
        "priority": fields["priority"],
        "replica": fields["replica"],
        "attempts": attempts,
        "prompt_tokens": prompt_tokens,
        "completion_tokens": seq - tokenless,
        "cancelled": fields["cancel"] == "1",
    }


_PAGE = 16
"""Entries of a queue that are read in one go."""
_LISTED_FIELDS = ("t_enqueued", "ticket", *FIELDS)


class OpenRequest(RequestFacts, frozen=True, kw_only=True):
    """`age_ms` counts from its enqueueing. `position` is its place in the order of arrival, from 1; None once it runs,
    and only then it has a `replica`."""

    age_ms: int
    position: int | None


def open_requests(client: SyncRedis, models: Sequence[str], limit: int, tenant: str | None = None) -> list[OpenRequest]:
    """Up to `limit` requests of these models that wait or run, oldest first; `tenant`: only its own.

    Raises RedisUnavailable.
    """
    claim_counts = run_every(client, [read("HGET", ModelKeys(model).load, "claimed", parse=_count) for model in models])
    claimed_by_model = dict(zip(models, claim_counts, strict=True))
    now = now_ms()
    oldest = _oldest(client, models, limit, tenant)
    requests = run_every(client, [_look_at_page(model, rid, now, claimed_by_model[model]) for model, rid in oldest])
    living = [request for request in requests if request is not None and request.state in ("queued", "running")]
    return sorted(living, key=lambda request: -request.age_ms)


def _oldest(client: SyncRedis, models: Sequence[str], limit: int, tenant: str | None) -> list[tuple[str, str]]:
    """Model and id of the requests that joined a queue first, those that run included: a merge of all queues, read in
    pages."""
    classes = [(ModelKeys(model), name) for model in models for name in CLASSES]
    tenants = run_every(client, [read("ZRANGE", keys.served(name), 0, -1, parse=list) for keys, name in classes])
    queues = [
        (keys.model, keys.queue(name, name_of_tenant))
        for (keys, name), names in zip(classes, tenants, strict=True)
        for name_of_tenant in names
        if tenant in (None, name_of_tenant)
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


def _look_at_page(model: str, rid: str, now: int, claimed: int) -> Call[OpenRequest | None]:
    def parse(reply: list[str | None]) -> OpenRequest | None:
        fields = named(_LISTED_FIELDS, reply)
        if not fields["t_enqueued"]:
            return None
        request = facts_of(model, rid, fields)
        if request["state"] != "running":
            request["replica"] = ""
        return OpenRequest(
            **request,
            age_ms=max(0, now - int(fields["t_enqueued"])),
            position=max(1, int(fields["ticket"] or 0) - claimed) if request["state"] == "queued" else None,
        )

    return read("HMGET", ModelKeys(model).request(rid), *_LISTED_FIELDS, parse=parse)


def _count(reply: str | None) -> int:
    return int(reply or 0)


_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")
"""Of the ids in answers; what follows is the request's id."""


def bare_id(rid: str) -> str:
    """The request's id in the id of an answer.

    >>> bare_id("chatcmpl-1f0c")
    '1f0c'
    """
    for prefix in _PREFIXES:
        rid = rid.removeprefix(prefix)
    return rid


def find(client: SyncRedis, models: list[str], rid: str, fields: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The model that has the request, and these fields of it, of which `state` is one. Raises RequestNotFound."""
    hashes = run_every(client, [_look(model, rid, fields) for model in models])
    for model, request_fields in zip(models, hashes, strict=True):
        if request_fields["state"]:
            return model, request_fields
    raise RequestNotFound(f"No request {rid!r} in any model. It may have ended more than its retention ago.")


def _look(model: str, rid: str, names: tuple[str, ...]) -> Call[dict[str, str]]:
    def parse(reply: list[str | None]) -> dict[str, str]:
        return named(names, reply)

    return read("HMGET", ModelKeys(model).request(rid), *names, parse=parse)


def cancel_any(client: SyncRedis, models: list[str], rid: str) -> RequestState:
    """End a request whosever it is, as an operator may, by its id or that of its answer. Raises RequestNotFound."""
    rid = bare_id(rid)
    model, fields = find(client, models, rid, ("state", "tenant"))
    return run(client, cancel(model, rid, fields["tenant"], "cancelled by the operator"))


_BEFORE = {"t_received": "received", "t_enqueued": "queued"}
_WITHIN = {"t_claimed": "claimed", "t_prefill": "prefill", "t_first": "first token", "t_last": "ended"}
_FIELDS = (*FIELDS, "cause", "cached_tokens", "n", "epochs", *_BEFORE, *_WITHIN)
_ORDER = ("received", "queued", "claimed", "prefill", "first token", "fault", "epoch", "adopted", "ended")
"""Of phases in one millisecond."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of a request, a fault that it met (`fault: KIND`), or the begin of an epoch after its first claim."""

    at_ms: int
    name: str
    detail: str = ""


class RequestEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's epoch that was given the request at `at_ms`. `until_ms` is the time of its fault, of the next epoch
    or of the request's end; None while it goes on."""

    replica: str
    epoch: int
    at_ms: int
    until_ms: int | None
    formed: health.Formation | None
    """The stages of its formation, if it was formed after the request's first claim."""
    fault: health.Fault | None
    """The fault that ended it."""


class RequestLife(RequestFacts, frozen=True, kw_only=True):
    """`phases` and `epochs` are in order of time. Times are Redis' clock; `received` is the API process's."""

    read_ms: int
    """The time of this reading."""
    cause: str
    choices: int
    cached_tokens: int
    phases: list[Phase]
    epochs: list[RequestEpoch]


def life_of(client: SyncRedis, models: list[str], rid: str) -> RequestLife:
    """The request in any of the models, by its id or that of its answer. Raises RequestNotFound, RedisUnavailable."""
    rid = bare_id(rid)
    model, fields = find(client, models, rid, _FIELDS)
    handovers = _handovers(fields)
    since = handovers[0][2] if handovers else 0
    until = int(fields["t_last"]) if fields["t_last"] else None
    replicas = sorted({replica for replica, _, _ in handovers})
    fault_lists = run_every(client, [health.faults(model, name, since, until) for name in replicas])
    formation_lists = run_every(client, [health.formations(model, name) for name in replicas])
    formations = [
        (name, event)
        for name, events in zip(replicas, formation_lists, strict=True)
        for event in events
        if since < event.led and (until is None or event.led < until)
    ]
    faults = [(name, event) for name, events in zip(replicas, fault_lists, strict=True) for event in events]
    phases = [
        *_moments(fields, handovers),
        *(_fault(event) for name, event in faults if _holder(handovers, event.at_ms) == name),
        *(_epoch(name, event) for name, event in formations if _holder(handovers, event.led) == name),
    ]
    return RequestLife(
        **facts_of(model, rid, fields),
        read_ms=now_ms(),
        cause=fields["cause"],
        choices=int(fields["n"] or 0),
        cached_tokens=int(fields["cached_tokens"] or 0),
        phases=sorted(phases, key=_place),
        epochs=_epochs(handovers, faults, formations, until),
    )


def _handovers(fields: dict[str, str]) -> list[tuple[str, int, int]]:
    """Replica, epoch and time of each hand-over to a leader, oldest first."""
    parts = [entry.rsplit(":", 2) for entry in fields["epochs"].split()]
    return [(replica, int(epoch), int(at)) for replica, epoch, at in parts]


def _holder(handovers: list[tuple[str, int, int]], at_ms: int) -> str:
    """The replica that had the request at a time, "" for none."""
    return next((replica for replica, _, since in reversed(handovers) if since <= at_ms), "")


def _moments(fields: dict[str, str], handovers: list[tuple[str, int, int]]) -> list[Phase]:
    """The phases that the request's hash holds. The last claim has a time of its own; the other hand-overs after the
    first are adoptions."""
    moments = _BEFORE | _WITHIN
    phases = [Phase(at_ms=int(fields[key]), name=name) for key, name in moments.items() if fields[key]]
    claim = next((place for place, handover in enumerate(handovers) if str(handover[2]) == fields["t_claimed"]), None)
    for place, (replica, epoch, at_ms) in enumerate(handovers):
        if place != claim:
            phases.append(
                Phase(at_ms=at_ms, name="adopted" if place else "claimed", detail=f"{replica}, epoch {epoch}")
            )
    return phases


def _fault(fault: health.Fault) -> Phase:
    named = fault.rank < 0 or fault.message.startswith(f"rank {fault.rank} ")
    rank = "" if named else f"rank {fault.rank}: "
    return Phase(at_ms=fault.at_ms, name=f"fault: {fault.kind}", detail=rank + fault.message)


def _epoch(replica: str, formation: health.Formation) -> Phase:
    return Phase(
        at_ms=formation.led,
        name="epoch",
        detail=f"{replica}, epoch {formation.epoch}: loaded after {formation.loaded - formation.led} ms",
    )


def _place(phase: Phase) -> tuple[int, int]:
    return phase.at_ms, _ORDER.index(phase.name.partition(":")[0])


def _epochs(
    handovers: list[tuple[str, int, int]],
    faults: list[tuple[str, health.Fault]],
    formations: list[tuple[str, health.Formation]],
    until: int | None,
) -> list[RequestEpoch]:
    """The hand-overs, each with what ended it."""
    ends = [*(at_ms for _, _, at_ms in handovers[1:]), until]
    by_epoch = {(name, one.epoch): one for name, one in faults}
    formation_of = {(name, one.epoch): one for name, one in formations}
    epochs: list[RequestEpoch] = []
    for (replica, epoch, at_ms), end in zip(handovers, ends, strict=bool(handovers)):
        fault = by_epoch.get((replica, epoch))
        stop = fault.at_ms if fault is not None else end
        formation = formation_of.get((replica, epoch))
        epochs.append(
            RequestEpoch(replica=replica, epoch=epoch, at_ms=at_ms, until_ms=stop, formed=formation, fault=fault)
        )
    return epochs
