"""Completes stored responses that run in the background, and those whose process has died.

A response that an HTTP handler follows to its end is stored by it. A background response is followed by a task here.
Each other open response is looked at every 20 seconds by some API process: its request is followed, or its token log,
which outlives its end by two minutes, is turned into the response.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
import structlog

from api.access.identity import Identity
from api.access.seals import Seals
from api.asgi.tasks import PeriodicTask, end
from api.errors.errors import StreamInterrupted, problem
from api.generation.archive import Archive
from api.generation.caller import Caller
from api.generation.existing import ExistingRequests
from api.generation.session import TURN_SCORED, Session
from api.observability.metrics import Metrics
from api.observability.request_log import RequestLog
from api.rendering.event_rendering import EventRenderer, renderer_of
from api.rendering.response_events import response_object
from api.schemas.view import Cursor, decode_view
from control import requests
from control.errors import FurrowError, RedisUnavailable, RequestNotFound
from control.records.responses import (
    KEYLESS,
    StoredResponse,
    close_response,
    due_owners,
    due_responses,
    owners,
    read_response,
)
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import arun
from control.replicas.health.memory import ServerMemory, server_memory

log = structlog.stdlib.get_logger(__name__)

EVERY_S = 5.0
_CANCELLED_WITHIN_S = 2.0
_LOOK_AGAIN_S = 0.02
_UNDER_WAY = ("queued", "in_progress")

_LOST = {"code": "server_error", "message": "The request was lost before its end was seen. Send it again."}


def _lost(stored: StoredResponse) -> dict[str, Any]:
    return {**response_object(stored.rid, decode_view(stored.view), "failed", []), "error": _LOST}


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
        self._client, self._sync_client = client, sync_client
        self._archive, self._existing, self._seals, self._metrics = archive, existing, seals, metrics
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

    async def current(self, stored: StoredResponse) -> dict[str, Any]:
        """The response as it is now. Raises RedisUnavailable, or ModelNotFound once its model is gone."""
        if stored.response is None:
            try:
                return await self._rebuild(stored)
            except RequestNotFound:
                again = await arun(self._client, read_response(stored.rid, stored.owner))
                if again is None or again.response is None:
                    return _lost(stored)
                stored = again
        assert stored.response is not None
        return msgspec.json.decode(stored.response)

    async def cancelled(self, stored: StoredResponse) -> dict[str, Any]:
        """The response once its request has ended, which a cancel makes soon; as it is then where it does not."""
        if stored.response is None:
            await self.cancel(stored)
        clock = asyncio.get_running_loop().time
        until = clock() + _CANCELLED_WITHIN_S
        while (response := await self.current(stored))["status"] in _UNDER_WAY and clock() < until:
            await asyncio.sleep(_LOOK_AGAIN_S)
        return response

    async def cancel(self, stored: StoredResponse) -> None:
        """Ask for the end of its request, which may be over already."""
        with suppress(RequestNotFound):
            call = requests.cancel(stored.model, stored.rid, stored.tenant, "cancelled by the client")
            await arun(self._client, call)

    async def _rebuild(self, stored: StoredResponse) -> dict[str, Any]:
        """The response from its token log; stored, if that has its end."""
        served, fields = await self._existing.find(stored.rid, stored.tenant, stored.model)
        view = decode_view(fields["view"])
        seal = await self._seals.sealer_for(view, stored.tenant)
        renderer = renderer_of(stored.rid, view, served.vocabulary, int(fields["prompt_tokens"]), seal=seal)
        assert isinstance(renderer, EventRenderer)
        async for page in requests.aread_pages(self._client, served.name, stored.rid):
            for at in range(0, len(page), TURN_SCORED):
                renderer.collect([], 0, page[at : at + TURN_SCORED])
                await asyncio.sleep(0)
        if renderer.finished and "t_last" not in fields:  # it ended while its log was read
            _, fields = await self._existing.find(stored.rid, stored.tenant, stored.model)
        if not renderer.finished or "t_last" not in fields:
            return {**renderer.so_far(), "status": "queued" if fields["state"] == "queued" else "in_progress"}
        renderer.ended_s = int(fields["t_last"]) / 1000
        body = renderer.to_store
        assert body is not None
        return msgspec.json.decode(await self._archive.complete(stored.rid, stored.owner, body))

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
        """One look at every open response whose turn it is."""
        for rid, owner in await arun(self._client, due_responses()):
            if rid in self._following:
                continue
            try:
                await self._look(rid, owner)
            except RedisUnavailable:
                raise
            except FurrowError as error:
                log.warning("could not look after a response", action="look_after", rid=rid, error=str(error))

    async def share_out(self) -> None:
        """Set the quota of stored responses, and hold the owners whose turn it is to it."""
        before, self.servers = self.servers, await asyncio.to_thread(server_memory, self._sync_client)
        if any(server.nearly_full for server in self.servers) and not any(server.nearly_full for server in before):
            log.warning("Redis is nearly full", action="redis_memory", servers=[str(server) for server in self.servers])
        self._archive.share_out(self.servers, await arun(self._client, owners()))
        for owner in await arun(self._client, due_owners()):
            await self._archive.trim(owner)

    async def _look(self, rid: str, owner: str) -> None:
        stored = await arun(self._client, read_response(rid, owner))
        if stored is None or stored.response is not None:
            await arun(self._client, close_response(rid, owner))
            return
        try:
            _, fields = await self._existing.find(rid, stored.tenant, stored.model)
            if fields["state"] not in ("queued", "running"):
                await self._rebuild(stored)
                return
        except RequestNotFound:
            await self._archive.complete(rid, owner, msgspec.json.encode(_lost(stored)))
            return
        if decode_view(stored.view).told["background"] and not fields.get("followers"):
            request_log = RequestLog(self._metrics, path="/v1/responses", client_request_id=None)
            identity = Identity(stored.tenant, account="" if owner == KEYLESS else stored.tenant)
            caller = Caller(request_log=request_log, tenant=stored.tenant, identity=identity, stalled=lambda: False)
            log.info("follows a response that nobody follows", action="follow_response", rid=rid, model=stored.model)
            self.follow(await self._existing.resume(Cursor(rid, []), caller, stored.model))
