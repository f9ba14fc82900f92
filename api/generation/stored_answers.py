"""Stored answers as they are now: of the record, or of the token log of a request that has not ended or was not stored.

Answers whose HTTP handler is gone are stored from here too, once their log has its end.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import msgspec
import structlog

from api.generation.archive import Archive
from api.generation.event_rendering import EventRenderer
from api.generation.existing import ExistingRequests
from api.generation.response_events import REPEATED, response_object
from api.generation.seals import Seals
from api.generation.session import TURN_SCORED, log_bytes, renderer_of
from api.http.turns import off_loop
from api.schemas.answers import encode as encode_answer
from api.schemas.response_answers import ResponseFailure, Status, StoredOutput
from api.schemas.view import View, decode_view
from control import requests
from control.errors import RequestNotFound
from control.messages import LogEntry, encode
from control.records.responses import StoredResponse, read_response
from control.redis.clients import AsyncRedis
from control.redis.connection import arun

log = structlog.stdlib.get_logger(__name__)

_CANCELLED_WITHIN_S = 2.0
_LOOK_AGAIN_S = 0.02
_UNDER_WAY = ("queued", "in_progress")

_LOST = "The request was lost before its end was seen. Send it again."
_WITHOUT_VOCABULARY = (
    "The model '{model}' was unloaded, or its tokenizer can't be used here, before the text of this answer was made. "
    "Load the model again, or send the request to another one."
)


class Unreadable(RequestNotFound):
    """The record of a response does not say how its answer is shown."""


def _failed(stored: StoredResponse, why: str) -> bytes:
    response = response_object(stored.rid, view_of(stored), "failed")
    response.error = ResponseFailure(message=why)
    return encode_answer(response)


def view_of(stored: StoredResponse) -> View:
    """The view of the stored answer. Raises Unreadable."""
    try:
        view = decode_view(stored.view)
    except msgspec.MsgspecError as error:
        raise _unreadable(stored, str(error)) from error
    if view.endpoint == "responses" and (absent := REPEATED - view.extra_fields.keys()):
        raise _unreadable(stored, f"it lacks {', '.join(sorted(absent))}")
    return view


def _unreadable(stored: StoredResponse, why: str) -> Unreadable:
    return Unreadable(
        f"The record of the response 'resp_{stored.rid}' can't be read, as it was damaged or written by another "
        f"version ({why}). Send the request again.",
        code="response_not_found",
    )


def _shown_state(fields: dict[str, str]) -> Status:
    return "queued" if fields["state"] == "queued" else "in_progress"


class StoredAnswers:
    """Reads the records of responses and chats, and completes those whose request has ended."""

    def __init__(self, client: AsyncRedis, archive: Archive, existing: ExistingRequests, seals: Seals) -> None:
        self._client = client
        self._archive = archive
        self._existing = existing
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
        served, fields = await self._existing.find_in(stored.rid, stored.tenant, stored.model)
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
        served, fields = await self._existing.find_in(stored.rid, stored.tenant, stored.model)
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
            _, fields = await self._existing.find_in(stored.rid, stored.tenant, stored.model)
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
        except Unreadable as error:
            log.warning("dropped a response", action="drop_response", rid=stored.rid, why=str(error))
            await self._archive.drop(stored.rid, stored.owner)
            return
        await self._archive.complete(stored.rid, stored.owner, body)
