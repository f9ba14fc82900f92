"""Stored responses and chat completions: what is kept beyond the request itself, to be read and built upon later.

A record is written when its request is accepted, and completed by the process that sees its end first. Until then it
stands in the set of open responses, which every API process looks through in turn: a response is completed though its
client left and its API process died.

An owner is a tenant with an API key, or all callers without one together. Each owner's records have a quota in bytes
and in number. The least lately used records of the same owner make room for a new one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from control import keys
from control.keys import ResponseKeys
from control.redis.connection import Call, read

Item = dict[str, Any]
Kind = Literal["response", "chat"]

KEYLESS = "~keyless"
"""The owner of what is stored for callers without a key; a tenant's name can't begin so."""
_FIELDS = ("tenant", "model", "view", "previous", "input", "response", "kind", "metadata", "named")
PAGE = 64
"""Ids that one call takes or returns at most."""

_items = msgspec.json.Decoder(list[Item]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """`previous`: the rid of the response that it continues, or "". `response` is None until it has ended. `metadata`
    is JSON, of a chat completion only: it may change."""

    rid: str
    owner: str
    tenant: str
    model: str
    view: str
    """The view of the request's answer, as in the request's own hash, which it outlives; "" once it has ended."""
    previous: str = ""
    input: list[Item]
    response: bytes | None = None
    kind: Kind = "response"
    metadata: str = ""
    named: str = ""
    """Of a chat completion: the model's name as the client sees it."""
    params: bytes = b""
    """Of a chat completion: its GenerationRequest, to compute it again; empty where that is not kept. It is not read
    with the record (`stored_request`)."""


@dataclass(frozen=True, slots=True)
class Quota:
    """Upper bounds on one owner's stored responses."""

    bytes: int
    number: int


@dataclass(frozen=True, slots=True)
class Ancestors:
    """A response and those that it continues, newest first, with the bytes of each; `next` is the rid to ask for next,
    "" at the beginning."""

    next: str
    rids: list[str]
    sizes: list[int]


@dataclass(frozen=True, slots=True)
class Trimmed:
    """`done` is false while more must go; `bytes` and `number` are left."""

    done: bool
    bytes: int
    number: int


def keep_response(response: StoredResponse, ttl_ms: int, quota: Quota) -> Call[bool]:
    """Store what was accepted; false while older ones must go before: call again. May be repeated."""
    fields = {
        "tenant": response.tenant,
        "model": response.model,
        "view": response.view,
        "previous": response.previous,
        "input": msgspec.json.encode(response.input).decode(),
    } | ({"kind": "chat", "metadata": response.metadata, "named": response.named} if response.kind == "chat" else {})
    words: list[str | bytes] = [word for pair in fields.items() for word in pair]
    if response.params:
        words += ["params", response.params]
    return _owned("keep_response", response.owner, response.rid, ttl_ms, quota.bytes, quota.number, *words, parse=bool)


def watch_response(rid: str, owner: str, kind: Kind = "response") -> list[Call[None]]:
    """Have an open response or chat, and what its owner stores, looked after from now on."""
    opened = keys.OPEN_CHATS if kind == "chat" else keys.OPEN_RESPONSES
    return [
        Call("watch_response", (opened,), (_member(rid, owner),), _nothing),
        Call("watch_response", (keys.RESPONSE_OWNERS,), (owner,), _nothing),
    ]


def end_response(
    rid: str, owner: str, response: bytes, ttl_ms: int, quota: Quota, entries: bytes = b""
) -> Call[bytes | None]:
    """Complete the record; what is stored afterwards, which is another's if that was first, or None if it is gone.

    `entries`: the token log (JSON), kept where the record was kept with its parameters and the quota has room for it.
    """

    def parse(reply: str | None) -> bytes | None:
        return reply.encode() if reply else None

    return _owned("end_response", owner, rid, ttl_ms, quota.bytes, quota.number, response, entries, parse=parse)


def close_response(rid: str, owner: str) -> list[Call[None]]:
    """An open response or chat needs no looking after any more."""
    return [read("ZREM", key, _member(rid, owner), parse=_nothing) for key in (keys.OPEN_RESPONSES, keys.OPEN_CHATS)]


def drop_response(rid: str, owner: str) -> list[Call[Any]]:
    """Forget it."""
    return [_owned("drop_response", owner, rid, parse=_nothing), *close_response(rid, owner)]


def read_response(rid: str, owner: str, *, with_input: bool = True) -> Call[StoredResponse | None]:
    """The record, without its input if so wanted, or None where there is none (any more)."""

    def parse(reply: list[str | None]) -> StoredResponse | None:
        tenant, model, view, previous, items, response, kind, metadata, named = reply
        if tenant is None or model is None or view is None:
            return None
        return StoredResponse(
            rid=rid,
            owner=owner,
            tenant=tenant,
            model=model,
            view=view,
            previous=previous or "",
            input=_items(items or "[]"),
            response=response.encode() if response else None,
            kind="chat" if kind == "chat" else "response",
            metadata=metadata or "",
            named=named or "",
        )

    fields = [name if with_input or name != "input" else "" for name in _FIELDS]
    return read("HMGET", ResponseKeys(owner).record(rid), *fields, parse=parse)


def use_responses(rids: list[str], owner: str, ttl_ms: int) -> list[Call[None]]:
    """Let them live as long again: another one builds upon them."""
    pages = [rids[start : start + PAGE] for start in range(0, len(rids), PAGE)]
    return [_owned("use_responses", owner, ttl_ms, *page, parse=_nothing) for page in pages]


def ancestors(rid: str, owner: str) -> Call[Ancestors]:
    """A page of the responses that one continues, itself first. One that is gone is listed as the last."""
    named = ResponseKeys(owner)

    def parse(reply: tuple[str, list[str], list[int]]) -> Ancestors:
        return Ancestors(*reply)

    return Call("chain_of_response", (named.sizes,), (named.record(""), rid, PAGE), parse)


def trim_responses(owner: str, quota: Quota) -> Call[Trimmed]:
    """Drop some of an owner's responses: those that have lapsed, and the oldest beyond the quota."""

    def parse(reply: tuple[int, int, int]) -> Trimmed:
        return Trimmed(bool(reply[0]), reply[1], reply[2])

    return _owned("trim_responses", owner, quota.bytes, quota.number, parse=parse)


def note_bytes(owner: str, trimmed: Trimmed) -> list[Call[None]]:
    """Tell operators what an owner stores; one that stores nothing is not looked after any more."""
    if trimmed.number:
        return [read("ZADD", keys.RESPONSE_BYTES, trimmed.bytes, owner, parse=_nothing)]
    return [read("ZREM", key, owner, parse=_nothing) for key in (keys.RESPONSE_BYTES, keys.RESPONSE_OWNERS)]


def owners() -> Call[int]:
    """The number of owners that store responses."""
    return read("ZCARD", keys.RESPONSE_OWNERS, parse=int)


def due_owners() -> Call[list[str]]:
    """Owners whose stored responses were not trimmed for a while; the caller does it now."""
    return Call("due_responses", (keys.RESPONSE_OWNERS,), (PAGE,), list)


def due_responses(most: int = PAGE) -> Call[list[tuple[str, str]]]:
    """Open responses that were not looked after for a while, as (rid, owner); the caller does it now."""
    return Call("due_responses", (keys.OPEN_RESPONSES,), (most,), _members)


def due_chats(most: int = PAGE) -> Call[list[tuple[str, str]]]:
    """As `due_responses`, of chats. They have a set of their own: a process of an older version can't complete them."""
    return Call("due_responses", (keys.OPEN_CHATS,), (most,), _members)


def _owned(script: str, owner: str, *words: Any, parse: Any) -> Call[Any]:
    """A call of a script that takes an owner's index and sizes, and the beginning of its records' keys."""
    named = ResponseKeys(owner)
    return Call(script, (named.index, named.sizes), (named.record(""), *words), parse)


def _member(rid: str, owner: str) -> str:
    return f"{rid} {owner}"


def _members(reply: list[str]) -> list[tuple[str, str]]:
    parts = (member.partition(" ") for member in reply)
    return [(rid, owner) for rid, _, owner in parts]


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class ChatPage:
    """Rids of some of an owner's stored chat completions, in order; `next` is the place of the page after it, 0 at the
    end."""

    rids: list[str]
    next: int


def list_chat(rid: str, owner: str, created_ms: int, ttl_ms: int, number: int) -> list[Call[int]]:
    """Put a record into the list, which keeps the newest `number`. It outlives its records, whose lives begin at their
    ends. May be repeated."""
    chats = ResponseKeys(owner).chats
    return [
        read("ZADD", chats, created_ms, rid, parse=int),
        read("ZREMRANGEBYRANK", chats, 0, -number - 1, parse=int),
        read("PEXPIRE", chats, 2 * ttl_ms, parse=int),
    ]


def chats_page(owner: str, place: int, *, newest_first: bool) -> Call[ChatPage]:
    """The records at the places from `place` on; those whose record is gone are dropped from the list."""
    named = ResponseKeys(owner)

    def parse(reply: tuple[int, list[str]]) -> ChatPage:
        return ChatPage(reply[1], reply[0])

    words = (place, PAGE, "desc" if newest_first else "asc")
    return Call("chats_page", (named.chats, named.index), words, parse)


@dataclass(frozen=True, slots=True)
class ChatLabels:
    """The part of a record by which lists choose: the model as the client sees it, and the metadata (JSON)."""

    tenant: str
    named: str
    metadata: str


def chat_labels(rid: str, owner: str) -> Call[ChatLabels | None]:
    """None where there is no such record (any more)."""

    def parse(reply: list[str | None]) -> ChatLabels | None:
        tenant, named, metadata = reply
        return None if tenant is None or named is None else ChatLabels(tenant, named, metadata or "{}")

    return read("HMGET", ResponseKeys(owner).record(rid), "tenant", "named", "metadata", parse=parse)


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The part of a chat's record by which it can be computed again: its parameters and its token log, both JSON, or
    "" where they were not kept."""

    model: str
    ended: bool
    params: str
    entries: str


def stored_request(rid: str, owner: str) -> Call[StoredRequest | None]:
    """None where the owner has no such chat."""

    def parse(reply: list[str | None]) -> StoredRequest | None:
        kind, model, view, params, entries = reply
        return StoredRequest(model or "", not view, params or "", entries or "") if kind == "chat" else None

    return read("HMGET", ResponseKeys(owner).record(rid), "kind", "model", "view", "params", "entries", parse=parse)


def storing_owners() -> Call[list[str]]:
    """All owners who store something."""
    return read("ZRANGE", keys.RESPONSE_OWNERS, 0, -1, parse=list)


def place_of_chat(rid: str, owner: str, *, newest_first: bool) -> Call[int | None]:
    """The place of a record in the list; None where it is not in it."""

    def parse(reply: int | None) -> int | None:
        return reply

    return read("ZREVRANK" if newest_first else "ZRANK", ResponseKeys(owner).chats, rid, parse=parse)


def relabel_chat(rid: str, owner: str, metadata: str) -> Call[bool]:
    """Replace a record's metadata, which is JSON; false where the record is gone."""
    named = ResponseKeys(owner)
    return Call("relabel_chat", (named.index, named.sizes), (named.record(""), rid, metadata), bool)
