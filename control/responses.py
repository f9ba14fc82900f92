"""Stored responses: what /v1/responses keeps beyond the request itself, so that it can be read and built upon later.

A record is written when its request is accepted, and completed by whoever sees the end first. Until then it stands in
the set of open responses, which every API process looks through in turn: a response is completed though its client
left and its API process died.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from control import keys
from control.connection import Call, read

Item = dict[str, Any]

_items = msgspec.json.Decoder(list[Item]).decode
_rids = msgspec.json.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """`chain`: the rids of the responses that it continues, oldest first. `response` is None until it has ended."""

    rid: str
    tenant: str
    model: str
    view: str
    """How the request's answer is shown, as in the request's own hash, which it outlives."""
    chain: list[str]
    input: list[Item]
    response: bytes | None = None


def keep_response(stored: StoredResponse, ttl_ms: int) -> list[Call[Any]]:
    """Store what was accepted, and have it looked after. May be repeated."""
    fields = {
        "tenant": stored.tenant,
        "model": stored.model,
        "view": stored.view,
        "chain": msgspec.json.encode(stored.chain).decode(),
        "input": msgspec.json.encode(stored.input).decode(),
    }
    words = [word for pair in fields.items() for word in pair]
    return [
        Call("keep_response", (keys.response(stored.rid),), (ttl_ms, *words), _nothing),
        Call("watch_response", (keys.OPEN_RESPONSES,), (stored.rid,), _nothing),
    ]


def end_response(rid: str, response: bytes, ttl_ms: int) -> Call[bytes | None]:
    """Complete the record; what is stored afterwards, which is another's if that was first, or None if it is gone."""

    def parse(reply: str | None) -> bytes | None:
        return reply.encode() if reply else None

    return Call("end_response", (keys.response(rid),), (ttl_ms, response), parse)


def close_response(rid: str) -> Call[None]:
    """Nobody needs to look after it any more."""
    return read("ZREM", keys.OPEN_RESPONSES, rid, parse=_nothing)


def drop_response(rid: str) -> list[Call[Any]]:
    """Forget it."""
    return [read("DEL", keys.response(rid), parse=_nothing), close_response(rid)]


def read_response(rid: str) -> Call[StoredResponse | None]:
    """The record, or None where there is none (any more)."""

    def parse(reply: list[str | None]) -> StoredResponse | None:
        tenant, model, view, chain, items, response = reply
        if tenant is None or model is None or view is None:
            return None
        return StoredResponse(
            rid=rid,
            tenant=tenant,
            model=model,
            view=view,
            chain=_rids(chain or "[]"),
            input=_items(items or "[]"),
            response=response.encode() if response else None,
        )

    return read("HMGET", keys.response(rid), "tenant", "model", "view", "chain", "input", "response", parse=parse)


def refresh_response(rid: str, ttl_ms: int) -> Call[None]:
    """Let it live as long again: another one builds upon it."""
    return read("PEXPIRE", keys.response(rid), ttl_ms, parse=_nothing)


def due_responses(most: int = 64) -> Call[list[str]]:
    """Open responses that nobody has looked after for a while; the caller does it now."""

    def parse(reply: list[str]) -> list[str]:
        return reply

    return Call("due_responses", (keys.OPEN_RESPONSES,), (most,), parse)


def _nothing(_: Any) -> None:
    return None
