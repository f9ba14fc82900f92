"""The stored chat completions of a tenant, as the routes read and change them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from api.generation.archive import Archive
from api.generation.stored_answers import StoredAnswers
from api.http.gate import Identity
from api.schemas.chat import Message
from control.errors import RequestNotFound
from control.records.responses import (
    ChatLabels,
    StoredResponse,
    chat_labels,
    chats_page,
    place_of_chat,
    read_response,
    relabel_chat,
)
from control.redis.batches import Batches

_ID = re.compile(r"chatcmpl-([0-9a-f]{32})")
_LANE = "responses"
MOST_LOOKED = 5_000
"""Records that one page of a list looks through: filters may leave out all."""


@dataclass(frozen=True, slots=True)
class StoredPage:
    """Bodies of a page of a list; `last` is the rid to go on after, "" at the end of the list."""

    bodies: list[bytes]
    last: str


class StoredChats:
    """Records of requests with `store: true`; one that has not ended yet is not there for a client."""

    def __init__(self, batches: Batches, archive: Archive, answers: StoredAnswers) -> None:
        self._batches = batches
        self._archive = archive
        self._answers = answers

    async def look_up(self, identity: str, who: Identity, param: str | None = None) -> StoredResponse:
        """The record, with its response. Raises RequestNotFound for one that is unknown, has not ended, failed, was
        removed, or is another tenant's."""
        match = _ID.fullmatch(identity)
        entry = await self._read(match[1], who) if match is not None else None
        if entry is None:
            raise self._gone(identity, param)
        return entry

    def _gone(self, identity: str, param: str | None) -> RequestNotFound:
        return RequestNotFound(
            f"Chat completion with id '{identity}' not found. It may have been sent without 'store': true, not "
            f"have ended yet, or have been deleted or removed to store newer ones ({self._archive.limits}).",
            param=param,
            code="completion_not_found",
        )

    async def page(
        self,
        who: Identity,
        *,
        after: str | None,
        limit: int,
        newest_first: bool,
        model: str | None,
        labels: dict[str, str],
    ) -> StoredPage:
        """Those with this model and these labels, at most `limit`.

        Raises RequestNotFound where `after` is none of the owner's.
        """
        place = await self._place_after(after, who, newest_first)
        bodies = list[bytes]()
        looked = 0
        last = ""
        async for rid, matches in self._all(who, place, newest_first, model, labels):
            if matches and (stored := await self._read(rid, who, with_input=False)) is not None:
                if len(bodies) == limit:
                    return StoredPage(bodies, last)
                bodies.append(shown(stored))
                last = rid
            looked += 1
            if looked == MOST_LOOKED:
                return StoredPage(bodies, rid)
        return StoredPage(bodies, "")

    async def relabel(self, stored: StoredResponse, metadata: dict[str, str]) -> None:
        """Replace its metadata. Raises RequestNotFound where it was removed meanwhile."""
        text = msgspec.json.encode(metadata).decode()
        if not await self._batches.run(_LANE, relabel_chat(stored.rid, stored.owner, text)):
            text = f"Chat completion with id 'chatcmpl-{stored.rid}' not found"
            raise RequestNotFound(f"{text}: it was deleted just now.", code="completion_not_found")

    async def drop(self, stored: StoredResponse) -> None:
        await self._archive.drop(stored.rid, stored.owner)

    async def _place_after(self, after: str | None, who: Identity, newest_first: bool) -> int:
        """The place in the list behind a record, which need not have ended."""
        if after is None:
            return 0
        match = _ID.fullmatch(after)
        call = place_of_chat(match[1], who.owner, newest_first=newest_first) if match is not None else None
        place = await self._batches.run(_LANE, call) if call is not None else None
        if place is None:
            raise self._gone(after, "after")
        return place + 1

    async def _all(
        self, who: Identity, place: int, newest_first: bool, model: str | None, labels: dict[str, str]
    ) -> AsyncIterator[tuple[str, bool]]:
        """The owner's records in order, from a place of the list on; True for the tenant's that have model and labels.

        Bodies are not read for this: a page of the list is two round trips.
        """
        while True:
            page = await self._batches.run(_LANE, chats_page(who.owner, place, newest_first=newest_first))
            labels_of_page = await self._batches.run_every(_LANE, [chat_labels(rid, who.owner) for rid in page.rids])
            for rid, chat in zip(page.rids, labels_of_page, strict=True):
                yield rid, chat is not None and chat.tenant == who.tenant and _matches(chat, model, labels)
            if not page.next:
                return
            place = page.next

    async def _read(self, rid: str, who: Identity, *, with_input: bool = True) -> StoredResponse | None:
        """The tenant's record of a chat that has ended."""
        stored = await self._batches.run(_LANE, read_response(rid, who.owner, with_input=with_input))
        if stored is None or stored.tenant != who.tenant or stored.kind != "chat":
            return None
        if stored.response is not None:
            return stored
        try:
            return await self._answers.ended_chat(stored)
        except RequestNotFound:
            return None


def shown(stored: StoredResponse) -> bytes:
    """The body of a stored chat completion, with its metadata."""
    assert stored.response is not None
    return stored.response[:-1] + b',"metadata":' + stored.metadata.encode() + b"}"


def _matches(chat: ChatLabels, model: str | None, labels: dict[str, str]) -> bool:
    if labels and not labels.items() <= msgspec.json.decode(chat.metadata, type=dict[str, str]).items():
        return False
    return model is None or chat.named == model


def kept_messages(rid: str, messages: list[Message]) -> list[dict[str, Any]]:
    """The messages of a chat with ids, as they are listed."""
    listed: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        fields_sent: dict[str, Any] = msgspec.to_builtins(message)
        fields = {name: value for name, value in fields_sent.items() if value is not None}
        content = fields.get("content")
        parts = content if isinstance(content, list) else None
        text = None if parts is not None else content
        listed.append(fields | {"content": text, "content_parts": parts, "id": f"chatcmpl-{rid}-{place}"})
    return listed
