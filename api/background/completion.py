"""Completes stored responses that run in the background, and those whose process has died.

A response, or a chat completion with `store`, that an HTTP handler follows to its end is stored by it. A background
response is followed by a task here. Each other open one is looked at every 20 seconds by some API process: its request
is followed, or its token log, which outlives its end by two minutes, is turned into what is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import msgspec
import structlog

from api.access.gate import Identity
from api.access.seals import Seals
from api.asgi.tasks import PeriodicTask, end
from api.asgi.turns import off_loop
from api.errors.errors import StreamInterrupted, problem
from api.generation.archive import Archive
from api.generation.existing import ExistingRequests
from api.generation.session import TURN_SCORED, Caller, Session, log_bytes, renderer_of
from api.observability import Metrics, RequestLog
from api.rendering.event_rendering import EventRenderer
from api.rendering.response_events import response_object
from api.schemas.answers import encode as encode_answer
from api.schemas.response_answers import ResponseFailure, Status, StoredOutput
from api.schemas.view import Cursor, View, decode_view
from control import requests
from control.errors import FurrowError, RedisUnavailable, RequestNotFound
from control.messages import LogEntry, encode
from control.records.responses import (
    KEYLESS,
    PAGE,
    StoredResponse,
    close_response,
    due_chats,
    due_owners,
    due_responses,
    owners,
    read_response,
)
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import Call, arun
from control.replicas.health.memory import ServerMemory, server_memory

log = structlog.stdlib.get_logger(__name__)

EVERY_S = 5.0
_ROUND_S = 10.0
"""A round looks at open responses for at most so long, and then at open chats: neither keeps the other waiting."""
_CANCELLED_WITHIN_S = 2.0
_LOOK_AGAIN_S = 0.02
_UNDER_WAY = ("queued", "in_progress")

_LOST = "The request was lost before its end was seen. Send it again."
_WITHOUT_VOCABULARY = (
    "The model '{model}' was unloaded, or its tokenizer can't be used here, before the text of this answer was made. "
    "Load the model again, or send the request to another one."
)


class _Unreadable(RequestNotFound):
    """The record of a response does not say how its answer is shown."""


def _failed(stored: StoredResponse, why: str) -> bytes:
    response = response_object(stored.rid, _view_of(stored), "failed")
    response.error = ResponseFailure(message=why)
    return encode_answer(response)


def _view_of(stored: StoredResponse) -> View:
    """How the answer is shown. Raises _Unreadable."""
    try:
        return decode_view(stored.view)
    except msgspec.MsgspecError as error:
        raise _Unreadable(
            f"The record of the response 'resp_{stored.rid}' can't be read, as it was damaged or written by another "
            f"version ({error}). Send the request again.",
            code="response_not_found",
        ) from error


def _shown_state(fields: dict[str, str]) -> Status:
    return "queued" if fields["state"] == "queued" else "in_progress"


class ResponseCompletion:
    """Runs in every API process."""

    def __init__(
        self,
        client: AsyncRedis,
        sync_client: SyncRedis,
        archive: Archive,
        existing: ExistingRequests,
        seals: Seals,
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._sync_client = sync_client
        self._archive = archive
        self._existing = existing
        self._seals = seals
        self._metrics = metrics
        self.servers: list[ServerMemory] = []
        """Redis' memory at the last look."""
        self._task = PeriodicTask("look_after", self._look_after, EVERY_S)
        self._following: dict[str, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        """Stop following. Requests go on; another process, or this one's successor, completes their responses."""
        await self._task.stop()
        await end(*self._following.values())

    def follow(self, session: Session) -> None:
        """Follow a request to its end without a client."""
        task = asyncio.create_task(self._follow(session))
        self._following[session.rid] = task
        task.add_done_callback(lambda _: self._following.pop(session.rid, None))

    async def current(self, stored: StoredResponse) -> bytes:
        """The response as it is now, in JSON, whatever the state of its model. Raises RedisUnavailable,
        ModelUnavailable while Redis has lost its model, and RequestNotFound for a record that can't be read."""
        if stored.response is None:
            try:
                return await self._rebuild(stored)
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
            await self._drop(stored, "it failed" if renderer.finished else "its log has no end")
            return None
        body = await off_loop(renderer.body_bytes, renderer.with_request, pieces)
        log_entries = await off_loop(log_bytes(len(entries), renderer), encode, entries)
        return replace(stored, response=await self._archive.complete(stored.rid, stored.owner, body, log_entries))

    async def _drop(self, stored: StoredResponse, why: str) -> None:
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

    async def _rebuild(self, stored: StoredResponse) -> bytes:
        """The response from its token log; stored, if that has its end. Raises RequestNotFound."""
        served, fields = await self._existing.find_in(stored.rid, stored.tenant, stored.model)
        view = _view_of(stored)
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

    async def _end_lost(self, stored: StoredResponse) -> None:
        """End a response whose log is gone; one that can't be shown is dropped."""
        try:
            body = _failed(stored, _LOST)
        except _Unreadable as error:
            log.warning("dropped a response", action="drop_response", rid=stored.rid, why=str(error))
            await self._archive.drop(stored.rid, stored.owner)
            return
        await self._archive.complete(stored.rid, stored.owner, body)

    # --- in the background ---

    async def _follow(self, session: Session) -> None:
        try:
            await session.collect()
            await session.store()
            failure = session.renderer.failure
            status = 200 if failure is None else problem(failure).status
            session.release(status=status, error=None if failure is None else str(failure))
        except asyncio.CancelledError:
            session.left()
            raise
        except StreamInterrupted as error:
            session.release(status=problem(error).status, error="cut by shutdown")
        except Exception as error:
            session.release(status=problem(error).status, error=str(error))
            if not isinstance(error, FurrowError):
                log.error("following a response failed", action="follow_response", rid=session.rid, exc_info=error)

    async def _look_after(self) -> None:
        await self.share_out()
        await self.look_round()

    async def look_round(self) -> None:
        """One look at every open response and every open chat whose turn it is."""
        await self._look_at_all(due_responses)
        await self._look_at_all(due_chats)

    async def _look_at_all(self, due: Callable[[], Call[list[tuple[str, str]]]]) -> None:
        clock = asyncio.get_running_loop().time
        until = clock() + _ROUND_S
        count = PAGE
        while count == PAGE and clock() < until:
            page = await arun(self._client, due())
            count = len(page)
            for rid, owner in page:
                if rid not in self._following:
                    await self._look_safely(rid, owner)

    async def _look_safely(self, rid: str, owner: str) -> None:
        """Look at one; an error, expected or not, leaves it to a later round and spares the others."""
        try:
            await self._look(rid, owner)
        except RedisUnavailable:
            raise
        except FurrowError as error:
            log.warning("could not look after a response", action="look_after", rid=rid, error=str(error))
        except Exception as error:
            log.error("looking after a response failed", action="look_after", rid=rid, exc_info=error)

    async def share_out(self) -> None:
        """Set the quota of stored responses, and hold the owners whose turn it is to it."""
        before = self.servers
        self.servers = await asyncio.to_thread(server_memory, self._sync_client)
        if any(server.nearly_full for server in self.servers) and not any(server.nearly_full for server in before):
            log.warning("Redis is nearly full", action="redis_memory", servers=[str(server) for server in self.servers])
        self._archive.share_out(self.servers, await arun(self._client, owners()))
        for owner in await arun(self._client, due_owners()):
            await self._archive.trim(owner)

    async def _look(self, rid: str, owner: str) -> None:
        stored = await arun(self._client, read_response(rid, owner, with_input=False))
        if stored is None or stored.response is not None:
            for call in close_response(rid, owner):
                await arun(self._client, call)
            return
        if stored.kind == "chat":
            try:
                await self.ended_chat(stored)
            except RequestNotFound:
                await self._drop(stored, "its log lapsed before any process could read it")
            return
        try:
            _, fields = await self._existing.find_in(rid, stored.tenant, stored.model)
            if fields["state"] not in ("queued", "running"):
                await self._rebuild(stored)
                return
        except _Unreadable:
            raise  # while its log is there a process of another version may read it
        except RequestNotFound:
            await self._end_lost(stored)
            return
        if _view_of(stored).extra_fields["background"] and not fields.get("followers"):
            request_log = RequestLog(self._metrics, path="/v1/responses", client_request_id=None)
            identity = Identity(stored.tenant, account="" if owner == KEYLESS else stored.tenant)
            caller = Caller(request_log=request_log, tenant=stored.tenant, identity=identity)
            log.info("follows a response that nobody follows", action="follow_response", rid=rid, model=stored.model)
            self.follow(await self._existing.resume(Cursor(rid, []), caller, stored.model))
