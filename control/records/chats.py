"""Stored chat completions: records as those of responses, with the same quota, and a list of each owner's."""

from __future__ import annotations

from dataclasses import dataclass

from control import keys
from control.keys import ResponseKeys
from control.records.responses import PAGE
from control.redis.connection import Call, read


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
