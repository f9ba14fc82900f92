"""Completes stored responses that run in the background, and those whose process has died.

A response, or a chat completion with `store`, that an HTTP handler follows to its end is stored by it. A background
response is followed by a task here. Each other open one is looked at every 20 seconds by some API process: its request
is followed, or its token log, which outlives its end by two minutes, is turned into what is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from api.generation.archive import Archive
from api.generation.client_request import Caller
from api.generation.session import Session, Sessions
from api.generation.stored_answers import StoredAnswers, UnreadableRecord, view_of
from api.http.errors import StreamInterrupted, problem
from api.http.gate import Identity
from api.http.tasks import PeriodicTask, end
from api.observability import Metrics, RequestLog
from api.schemas.view import StreamCursor
from control.errors import FurrowError, RedisUnavailable, RequestNotFound
from control.records.responses import (
    KEYLESS,
    PAGE,
    close_response,
    due_chats,
    due_owners,
    due_responses,
    owners,
    read_response,
)
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import Call, arun
from control.redis.servers import ServerMemory, server_memory

log = structlog.stdlib.get_logger(__name__)

EVERY_S = 5.0
_ROUND_S = 10.0
"""A round looks at open responses for at most so long, and then at open chats: neither keeps the other waiting."""


class ResponseCompletion:
    """Runs in every API process."""

    def __init__(
        self,
        client: AsyncRedis,
        sync_client: SyncRedis,
        archive: Archive,
        sessions: Sessions,
        answers: StoredAnswers,
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._sync_client = sync_client
        self._archive = archive
        self._sessions = sessions
        self._answers = answers
        self._metrics = metrics
        self.servers: list[ServerMemory] = []
        """Redis' memory at the last look."""
        self._task = PeriodicTask("look_after", self._look_after, EVERY_S)
        self.start = self._task.start
        self._following: dict[str, asyncio.Task[None]] = {}

    async def stop(self) -> None:
        """Stop following. Requests go on; another process, or this one's successor, completes their responses."""
        await self._task.stop()
        await end(*self._following.values())

    def follow(self, session: Session) -> None:
        """Follow a request to its end without a client."""
        task = asyncio.create_task(self._follow(session))
        self._following[session.rid] = task
        task.add_done_callback(lambda _: self._following.pop(session.rid, None))

    async def _follow(self, session: Session) -> None:
        try:
            await session.collect()
            await session.store()
            failure = session.renderer.failure
            status = 200 if failure is None else problem(failure).status
            session.release(status=status, error=None if failure is None else str(failure))
        except asyncio.CancelledError:
            session.abandon()
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
                await self._answers.ended_chat(stored)
            except RequestNotFound:
                await self._answers.drop(stored, "its log lapsed before any process could read it")
            return
        try:
            _, fields = await self._sessions.find_in(rid, stored.tenant, stored.model)
            if fields["state"] not in ("queued", "running"):
                await self._answers.rebuild(stored)
                return
        except UnreadableRecord:
            raise  # while its log is there a process of another version may read it
        except RequestNotFound:
            await self._answers.end_lost(stored)
            return
        if view_of(stored).extra_fields["background"] and not fields.get("followers"):
            request_log = RequestLog(self._metrics, path="/v1/responses", client_request_id=None)
            identity = Identity(stored.tenant, account="" if owner == KEYLESS else stored.tenant)
            caller = Caller(request_log=request_log, tenant=stored.tenant, identity=identity)
            log.info("follows a response that nobody follows", action="follow_response", rid=rid, model=stored.model)
            self.follow(await self._sessions.resume(StreamCursor(rid, []), caller, stored.model))
