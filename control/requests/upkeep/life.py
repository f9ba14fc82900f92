"""The life of one request, for an operator: its phases, its attempts, and the faults of the replica that had it."""

from __future__ import annotations

from typing import Any

import msgspec

from control.errors import RequestNotFound
from control.keys import ModelKeys, ReplicaKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every
from control.redis.streams import Entry

_PHASES = {
    "t_received": "received",
    "t_enqueued": "queued",
    "t_claimed": "claimed",
    "t_prefill": "prefill",
    "t_first": "first token",
    "t_last": "ended",
}
_COUNTS = ("attempts", "prompt_tokens", "cached_tokens", "seq", "tokenless", "n")
_TEXTS = ("state", "tenant", "account", "priority", "replica", "cause")
_FIELDS = (*_TEXTS, *_COUNTS, *_PHASES)


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of a request, or a fault that it met."""

    at_ms: int
    name: str
    detail: str = ""


class RequestLife(msgspec.Struct, frozen=True, kw_only=True):
    """`replica` had the request last; `key` is what its usage is counted under. `phases` are in order of time, with the
    poisons of that replica from the claim to the end."""

    id: str
    model: str
    state: str
    tenant: str
    key: str
    priority: str
    replica: str
    cause: str
    attempts: int
    choices: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    phases: list[Phase]


def life_of(client: SyncRedis, models: list[str], rid: str) -> RequestLife:
    """The request in any of the models. Raises RequestNotFound, RedisUnavailable."""
    found = run_every(client, [_look(model, rid) for model in models])
    for model, fields in zip(models, found, strict=True):
        if fields["state"]:
            return _life(client, model, rid, fields)
    raise RequestNotFound(f"No request {rid!r} in any model. It may have ended more than its retention ago.")


def _look(model: str, rid: str) -> Call[dict[str, str]]:
    def parse(reply: list[str | None]) -> dict[str, str]:
        return {name: value or "" for name, value in zip(_FIELDS, reply, strict=True)}

    return read("HMGET", ModelKeys(model).request(rid), *_FIELDS, parse=parse)


def _life(client: SyncRedis, model: str, rid: str, fields: dict[str, str]) -> RequestLife:
    counts = {name: int(fields[name] or 0) for name in _COUNTS}
    phases = [Phase(at_ms=int(fields[key]), name=name) for key, name in _PHASES.items() if fields[key]]
    if fields["t_claimed"] and fields["replica"]:
        since, until = fields["t_claimed"], fields["t_last"] or "+"
        phases += run(client, _faults(model, fields["replica"], since, until))
    order = list(_PHASES.values())
    phases.sort(key=lambda phase: (phase.at_ms, order.index(phase.name) if phase.name in order else len(order)))
    return RequestLife(
        id=rid,
        model=model,
        state=fields["state"],
        tenant=fields["tenant"],
        key=fields["account"],
        priority=fields["priority"],
        replica=fields["replica"],
        cause=fields["cause"],
        attempts=counts["attempts"],
        choices=counts["n"],
        prompt_tokens=counts["prompt_tokens"],
        cached_tokens=counts["cached_tokens"],
        completion_tokens=counts["seq"] - counts["tokenless"],
        phases=phases,
    )


def _faults(model: str, replica: str, since_ms: str, until_ms: str) -> Call[list[Phase]]:
    """The poisons of a replica in a time, oldest first."""

    def parse(reply: list[Entry]) -> list[Phase]:
        return [_fault(entry, fields) for entry, fields in reply]

    return read("XRANGE", ReplicaKeys(model, replica).poisons, since_ms, until_ms, "COUNT", 64, parse=parse)


def _fault(entry: str, fields: dict[str, Any]) -> Phase:
    rank = "" if fields["rank"] == "-1" else f"rank {fields['rank']}: "
    return Phase(at_ms=int(entry.partition("-")[0]), name=f"fault: {fields['kind']}", detail=rank + fields["message"])
