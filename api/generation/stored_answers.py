"""Stored answers as they are now, from the record, or from the token log of a request that has not ended or was not
stored; and the stored chat completions of a tenant, as the routes read and change them.

Answers whose HTTP handler is gone are stored from here too, once their log has its end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog

from api.generation.archive import Archive
from api.generation.event_rendering import EventRenderer
from api.generation.response_events import REPEATED, response_object
from api.generation.seals import Seals
from api.generation.session import TURN_SCORED, Sessions, log_bytes, renderer_of
from api.http.gate import Identity
from api.http.turns import off_loop
from api.schemas.answers import encode as encode_answer
from api.schemas.chat import Message
from api.schemas.response_answers import ResponseFailure, Status, StoredOutput
from api.schemas.view import View, decode_view
from control import requests
from control.errors import RequestNotFound
from control.messages import LogEntry, encode
from control.records.responses import (
    ChatLabels,
    StoredResponse,
    chat_labels,
    chats_page,
    place_of_chat,
    read_response,
    relabel_chat,
)
from control.redis.clients import AsyncRedis
from control.redis.connection import Batches, arun

log = structlog.stdlib.get_logger(__name__)

_CANCELLED_WITHIN_S = 2.0
_LOOK_AGAIN_S = 0.02
_UNDER_WAY = ("queued", "in_progress")

_LOST = "The request was lost before its end was seen. Send it again."
_WITHOUT_VOCABULARY = (
    "The model '{model}' was unloaded, or its tokenizer can't be used here, before the text of this answer was made. "
    "Load the model again, or send the request to another one."
)


class UnreadableRecord(RequestNotFound):
    """The record of a response does not say how its answer is shown."""


def _failed(stored: StoredResponse, why: str) -> bytes:
    response = response_object(stored.rid, view_of(stored), "failed")
    response.error = ResponseFailure(message=why)
    return encode_answer(response)


def view_of(stored: StoredResponse) -> View:
    """The view of the stored answer. Raises UnreadableRecord."""
    try:
        view = decode_view(stored.view)
    except msgspec.MsgspecError as error:
        raise _unreadable(stored, str(error)) from error
    if view.endpoint == "responses" and (absent := REPEATED - view.extra_fields.keys()):
        raise _unreadable(stored, f"it lacks {', '.join(sorted(absent))}")
    return view


def _unreadable(stored: StoredResponse, why: str) -> UnreadableRecord:
    return UnreadableRecord(
        f"The record of the response 'resp_{stored.rid}' can't be read, as it was damaged or written by another "
        f"version ({why}). Send the request again.",
        code="response_not_found",
    )


def _shown_state(fields: dict[str, str]) -> Status:
    return "queued" if fields["state"] == "queued" else "in_progress"


class StoredAnswers:
    """Reads the records of responses and chats, and completes those whose request has ended."""

    def __init__(self, client: AsyncRedis, archive: Archive, sessions: Sessions, seals: Seals) -> None:
        self._client = client
        self._archive = archive
        self._sessions = sessions
        self._seals = seals

    async def current(self, stored: StoredResponse) -> bytes:
        """The response as it is now, in JSON, whatever the state of its model. Raises RedisUnavailable,
        ModelUnavailable while Redis has lost its model, and RequestNotFound for a record that can't be read."""
        if stored.response is None:
            try:
                return await self.rebuild(stored)
            except RequestNotFound:
                again = await arun(self._client, read_response(stored.rid, stored.owner))
                if again is None or again.response is None:
                    return _failed(stored, _LOST)
                stored = again
        assert stored.response is not None
        return stored.response

    async def ended_chat(self, stored: StoredResponse) -> StoredResponse | None:
        """The record of a chat completion with its body; None while it runs, where it failed, which is not stored, and
        where no vocabulary is left of its model. Raises RedisUnavailable, or RequestNotFound where its log is gone."""
        served, fields = await self._sessions.find_in(stored.rid, stored.tenant, stored.model)
        if fields["state"] in ("queued", "running") or served is None:
            return None
        view = decode_view(fields["view"])
        renderer = renderer_of(stored.rid, view, served.vocabulary, int(fields["prompt_tokens"]))
        pieces = renderer.empty_pieces()
        entries = list[LogEntry]()
        async for page in requests.aread_pages(self._client, served.name, stored.rid):
            entries += page
            for at in range(0, len(page), TURN_SCORED):
                renderer.collect(pieces, 0, page[at : at + TURN_SCORED])
                await asyncio.sleep(0)
        if not renderer.finished or renderer.failure is not None:
            await self.drop(stored, "it failed" if renderer.finished else "its log has no end")
            return None
        body = await off_loop(renderer.body_bytes, renderer.with_request, pieces)
        log_entries = await off_loop(log_bytes(len(entries), renderer), encode, entries)
        return replace(stored, response=await self._archive.complete(stored.rid, stored.owner, body, log_entries))

    async def drop(self, stored: StoredResponse, why: str) -> None:
        log.warning("dropped a chat completion", action="drop_chat", rid=stored.rid, model=stored.model, why=why)
        await self._archive.drop(stored.rid, stored.owner)

    async def cancelled(self, stored: StoredResponse) -> bytes:
        """The response in JSON once its request has ended, which a cancel makes soon; as it is then where it does
        not."""
        if stored.response is None:
            await self.cancel(stored)
        clock = asyncio.get_running_loop().time
        until = clock() + _CANCELLED_WITHIN_S
        while True:
            response = await self.current(stored)
            if msgspec.json.decode(response, type=StoredOutput).status not in _UNDER_WAY or clock() >= until:
                return response
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def cancel(self, stored: StoredResponse) -> None:
        """Ask for the end of its request, which may be over already."""
        with suppress(RequestNotFound):
            call = requests.cancel(stored.model, stored.rid, stored.tenant, "cancelled by the client")
            await arun(self._client, call)

    async def rebuild(self, stored: StoredResponse) -> bytes:
        """The response from its token log; stored, if that has its end. Raises RequestNotFound."""
        served, fields = await self._sessions.find_in(stored.rid, stored.tenant, stored.model)
        view = view_of(stored)
        if served is None:
            if fields["state"] in ("queued", "running"):
                return encode_answer(response_object(stored.rid, view, _shown_state(fields)))
            return _failed(stored, _WITHOUT_VOCABULARY.format(model=stored.model))
        seal = await self._seals.sealer(stored.tenant) if view.sealed else None
        renderer = renderer_of(stored.rid, view, served.vocabulary, int(fields["prompt_tokens"]), seal=seal)
        assert isinstance(renderer, EventRenderer)
        async for page in requests.aread_pages(self._client, served.name, stored.rid):
            for at in range(0, len(page), TURN_SCORED):
                renderer.collect([], 0, page[at : at + TURN_SCORED])
                await asyncio.sleep(0)
        if renderer.finished and "t_last" not in fields:  # it ended while its log was read
            _, fields = await self._sessions.find_in(stored.rid, stored.tenant, stored.model)
        if not renderer.finished or "t_last" not in fields:
            return encode_answer(renderer.so_far(_shown_state(fields)))
        renderer.ended_s = int(fields["t_last"]) / 1000
        body = await off_loop(renderer.body_bytes, lambda: renderer.to_store)
        assert body is not None
        return await self._archive.complete(stored.rid, stored.owner, body)

    async def end_lost(self, stored: StoredResponse) -> None:
        """End a response whose log is gone; one that can't be shown is dropped."""
        try:
            body = _failed(stored, _LOST)
        except UnreadableRecord as error:
            log.warning("dropped a response", action="drop_response", rid=stored.rid, why=str(error))
            await self._archive.drop(stored.rid, stored.owner)
            return
        await self._archive.complete(stored.rid, stored.owner, body)


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
    """Records of requests with `store: true`; clients do not see one that has not ended yet."""

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
            raise self._not_found(identity, param)
        return entry

    def _not_found(self, identity: str, param: str | None) -> RequestNotFound:
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
        records_read = 0
        last = ""
        async for rid, matches in self._all(who, place, newest_first, model, labels):
            if matches and (stored := await self._read(rid, who, with_input=False)) is not None:
                if len(bodies) == limit:
                    return StoredPage(bodies, last)
                bodies.append(stored_body(stored))
                last = rid
            records_read += 1
            if records_read == MOST_LOOKED:
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
            raise self._not_found(after, "after")
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


def stored_body(stored: StoredResponse) -> bytes:
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
