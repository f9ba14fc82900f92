"""Enqueues a request, or follows one that is enqueued already."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import structlog

from api.access.limiter import Limiter
from api.access.settler import Settler
from api.errors.errors import ShuttingDown
from api.errors.request_ids import member_rid
from api.follow.feed import Feed
from api.follow.follow import Follower
from api.generation.archive import Archive
from api.generation.backpressure import Backpressure
from api.generation.caller import Caller
from api.generation.preparation import Body, prepare
from api.generation.session import Session
from api.models.grammar import GrammarChecks
from api.models.models import Models, ServedModel
from api.rendering.event_rendering import renderer_of
from api.rendering.rendering import StreamRenderer
from api.schemas.view import Cursor, decode_view
from api.settings import ApiSettings
from control import requests
from control.errors import FurrowError, ModelNotFound, QueueFull, RedisUnavailable, RequestError, RequestNotFound
from control.redis.batches import Batches

log = structlog.stdlib.get_logger(__name__)

_LOOK_AGAIN_S = 0.2


class Submitter:
    """Enqueues requests and follows them."""

    def __init__(
        self,
        batches: Batches,
        models: Models,
        follower: Follower,
        archive: Archive,
        grammars: GrammarChecks,
        limiter: Limiter,
        settler: Settler,
        settings: ApiSettings,
        interrupted: Callable[[], bool],
    ) -> None:
        self._batches, self._models, self._follower = batches, models, follower
        self._archive, self._grammars, self._limiter, self._settler = archive, grammars, limiter, settler
        self._settings, self._interrupted = settings, interrupted
        self._backpressure = Backpressure()

    async def submit(self, body: Body, caller: Caller) -> Session:
        """Check, tokenise and enqueue; an Idempotency-Key that is known joins the request that runs.

        Raises RequestError and its kin, RateLimited, QueueFull, ModelUnavailable, RedisUnavailable.
        """
        served = await self._models.resolve(body.model)
        caller.request_log.know(model=served.name)
        caller.identity.check_model(body.model, served.name)
        whose = served.name, caller.tenant, caller.identity.priority(body.priority)
        if not caller.idempotency_key:  # with one it may join what is in the queue already
            self._backpressure.check(*whose)
        prepared = await prepare(body, caller, served, self._grammars)
        caller.request_log.know(prompt_tokens=prepared.prompt_tokens)
        await self._follower.subscribe(served.name)
        members = {member_rid(caller.rid, member): asked for member, asked in enumerate(prepared.members)}
        hold = await self._limiter.begin(caller.identity.key, served.name, members, prepared.tell_allowance)
        first, feeds, wake, queued = caller.rid, list[Feed](), asyncio.Event(), 0
        try:
            for member in range(len(prepared.members)):
                rid = member_rid(first, member)
                # Before the enqueue: the first tokens may be published before its answer is here.
                feeds.append(self._follower.open(served.name, rid, caller.tenant, wake))
                origin = prepared.enqueue(first, member, self._settings)
                enqueued = await self._batches.run(served.name, requests.enqueue(origin))
                queued += 1
                if enqueued.rid != rid:
                    self._follower.close(feeds.pop())
                    feeds.append(self._follower.open(served.name, enqueued.rid, caller.tenant, wake))
                    first = enqueued.rid if member == 0 else first
                # The request that was joined may have another seed than the one drawn here.
                feeds[-1].begin(origin if feeds[-1].rid == rid and first == caller.rid else None)
                feeds[-1].position = enqueued.position
        except BaseException as error:
            self._abandon(feeds)
            if hold is not None:
                # One whose answer is lost may have been queued: then its end settles it, else its estimate stands.
                lost = isinstance(error, RedisUnavailable | asyncio.CancelledError)
                hold.refund(queued + lost)
            if isinstance(error, QueueFull):
                self._backpressure.note(*whose, error)
            if isinstance(error, FurrowError) and first == caller.rid:
                await self._withdraw(served.name, list(members)[: queued + 1], caller.tenant)
            raise
        caller.request_log.know(rid=first)
        if first != caller.rid:
            if hold is not None:
                hold.refund()  # the request that was joined has a hold of its own
            return await self._join(first, caller, served, feeds, wake)
        renderer = renderer_of(first, prepared.view(), served.vocabulary, prepared.prompt_tokens)
        return self._session(first, renderer, feeds, wake, caller, served)

    async def resume(self, cursor: Cursor, caller: Caller, model: str | None) -> Session:
        """Follow a request that is known by its id, and suppress what the cursor says was sent; no places: nothing.

        Places prove that the request was there. If it is not, Redis may have lost it a moment ago: whoever follows it
        gets the time to bring it back. Raises RequestNotFound if it is gone, or another tenant's.
        """
        clock = asyncio.get_running_loop().time
        began, wait, told = clock(), self._settings.lost_wait if cursor.places else 0.0, False
        while True:
            try:
                return await self._take_up(cursor, caller, model)
            except (RequestNotFound, ModelNotFound) as error:
                if clock() - began >= wait:
                    raise
                if not told:
                    log.info(
                        "waits for a request that is not there", action="await_lost", rid=cursor.rid, why=str(error)
                    )
                    told = True
            if self._interrupted():
                raise ShuttingDown("This API process is shutting down. Send the request to another one.")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _take_up(self, cursor: Cursor, caller: Caller, model: str | None) -> Session:
        served, fields = await self.find(cursor.rid, caller.tenant, model)
        view = decode_view(fields["view"])
        if view.member:
            raise RequestNotFound(f"{cursor.rid!r} is a part of another request; follow that one.")
        if len(cursor.places) not in (0, view.members):
            raise RequestError(
                f"Last-Event-ID has {len(cursor.places)} places, the stream has {view.members}.",
                param="last-event-id",
                code="invalid_event_id",
            )
        await self._follower.subscribe(served.name)
        wake = asyncio.Event()
        rids = [member_rid(cursor.rid, member) for member in range(view.members)]
        feeds = [self._follower.open(served.name, rid, caller.tenant, wake) for rid in rids]
        caller.request_log.know(rid=cursor.rid, model=served.name, resumed=True)
        return await self._join(cursor.rid, caller, served, feeds, wake, cursor)

    async def find(self, rid: str, tenant: str, model: str | None = None) -> tuple[ServedModel, dict[str, str]]:
        """The model and the hash of a request; looks in every model unless one is named. Raises RequestNotFound."""
        served = await self._models.resolve(model) if model is not None else None
        places = [served] if served is not None else await self._models.all_served()
        looks = [self._batches.run(place.name, requests.follow(place.name, rid, "", tenant, 2**40)) for place in places]
        for place, found in zip(places, await asyncio.gather(*looks, return_exceptions=True), strict=True):
            if isinstance(found, requests.Followed):
                return place, found.fields
            if not isinstance(found, RequestNotFound):
                raise found
        raise RequestNotFound(f"No request {rid!r}. It may have ended more than its retention ago.")

    async def _join(
        self,
        rid: str,
        caller: Caller,
        served: ServedModel,
        feeds: list[Feed],
        wake: asyncio.Event,
        cursor: Cursor | None = None,
    ) -> Session:
        """Take up a request that somebody began: its own view says how it is shown."""
        try:
            await self._follower.meet(feeds)
        except BaseException:
            self._abandon(feeds)
            raise
        log.info("took up a request that another client or process began", action="take_up", rid=rid, model=served.name)
        view = decode_view(feeds[0].fields["view"])
        prompt_tokens = sum(int(feed.fields["prompt_tokens"]) for feed in feeds)
        caller.request_log.know(prompt_tokens=prompt_tokens)
        renderer = renderer_of(rid, view, served.vocabulary, prompt_tokens, cursor)
        return self._session(rid, renderer, feeds, wake, caller, served)

    async def _withdraw(self, model: str, rids: list[str], tenant: str) -> None:
        """End the parts of a request of which another part was refused, whatever its `on_disconnect` says."""
        cause = "another part of the request was refused"
        for rid in rids if len(rids) > 1 else []:
            with suppress(RequestNotFound, RedisUnavailable):
                await self._batches.run(model, requests.cancel(model, rid, tenant, cause))

    def _abandon(self, feeds: list[Feed]) -> None:
        for feed in feeds:
            self._follower.leave(feed, None)

    def _session(
        self,
        rid: str,
        renderer: StreamRenderer,
        feeds: list[Feed],
        wake: asyncio.Event,
        caller: Caller,
        served: ServedModel,
    ) -> Session:
        return Session(
            rid=rid,
            renderer=renderer,
            feeds=feeds,
            wake=wake,
            request_log=caller.request_log,
            follower=self._follower,
            settings=self._settings,
            interrupted=self._interrupted,
            stalled=caller.stalled,
            archive=self._archive,
            owner=caller.identity.owner,
            settle_limits=partial(self._settler.nudge, served.name) if caller.identity.limited else None,
        )
