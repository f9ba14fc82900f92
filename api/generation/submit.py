"""Enqueues the requests of one HTTP request.

A fresh refusal by a full queue is repeated without tokenising the prompt and asking Redis again (`Backpressure`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from api.generation.archive import Archive
from api.generation.client_request import Body, ClientRequest, text_request
from api.generation.follow import Feeds
from api.generation.pooling_request import pooling_request
from api.generation.seals import Seals
from api.generation.session import Caller, Session, Sessions, renderer_of
from api.http.limits import Limiter
from api.models.grammar import GrammarChecks
from api.models.models import Models, ServedModel
from api.schemas.embeddings import InputsRequest
from api.settings import ApiSettings
from control import requests
from control.errors import FurrowError, QueueFull, RedisUnavailable, RequestNotFound
from control.redis.batches import Batches
from control.requests import member_rid

FRESH_S = 0.1
"""Seconds for which a refusal stands. Few places become free meanwhile, so a queue worth waiting in doesn't run dry."""
_MOST = 4096


class Backpressure:
    """The refusals of the last moments, by model, tenant and class."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[str, str, str], tuple[float, QueueFull]] = {}

    def note(self, model: str, tenant: str, priority: str, error: QueueFull) -> None:
        """Remember a refusal, unless it was for the request's own size: a smaller one may get in."""
        if error.bound == "tokens":
            return
        now = self._clock()
        if len(self._refused) >= _MOST:
            self._refused = {who: last for who, last in self._refused.items() if now - last[0] < FRESH_S}
        self._refused[model, tenant, priority] = now, error

    def check(self, model: str, tenant: str, priority: str) -> None:
        """Raises the QueueFull that still stands, if there is one."""
        at, error = self._refused.get((model, tenant, priority), (0.0, None))
        if error is not None and self._clock() - at < FRESH_S:
            raise QueueFull(error.model, error.queued, error.retry_after, error.bound)


class Submitter:
    """Enqueues requests and opens their sessions."""

    def __init__(
        self,
        batches: Batches,
        models: Models,
        sessions: Sessions,
        seals: Seals,
        grammars: GrammarChecks,
        limiter: Limiter,
        archive: Archive,
        settings: ApiSettings,
    ) -> None:
        self._batches = batches
        self._models = models
        self._sessions = sessions
        self._seals = seals
        self._grammars = grammars
        self._limiter = limiter
        self._settings = settings
        self._archive = archive
        self._backpressure = Backpressure()

    async def submit(self, body: Body | InputsRequest, caller: Caller) -> Session:
        """Check, tokenise and enqueue; an Idempotency-Key that is known joins the request that runs.

        Raises RequestError and its kin, RateLimited, QueueFull, ModelUnavailable, RedisUnavailable.
        """
        served = await self._models.resolve(body.model)
        caller.request_log.know(model=served.name)
        caller.identity.check_model(body.model, served.name)
        queue = served.name, caller.tenant, caller.identity.priority(body.priority)
        if not caller.idempotency_key:  # with one it may join a request that is queued already
            self._backpressure.check(*queue)
        caller.check_present(body.on_disconnect)
        request = await self._client_request(body, caller, served)
        caller.check_present(body.on_disconnect)
        caller.request_log.know(prompt_tokens=request.prompt_tokens)
        view = request.view
        seal = await self._seals.sealer(caller.tenant) if view.sealed else None
        feeds = await self._sessions.feeds(served.name, caller.tenant, caller.rid)
        members = {member_rid(caller.rid, place): member for place, member in enumerate(request.members)}
        refund = await self._limiter.begin(caller.identity.key, served.name, members, request.tell_allowance)
        try:
            await self._enqueue(request, feeds, lambda: caller.check_present(body.on_disconnect))
        except BaseException as error:
            feeds.leave()
            queued = sum(feed.begun for feed in feeds.members)
            # One whose answer is lost may have been queued: then its end settles it, else its estimate stands.
            refund(queued + isinstance(error, RedisUnavailable | asyncio.CancelledError))
            if isinstance(error, QueueFull):
                self._backpressure.note(*queue, error)
            if queued and isinstance(error, FurrowError) and feeds.rid == caller.rid:
                await self._withdraw(served.name, list(members)[: queued + 1], caller.tenant)
            raise
        if feeds.rid != caller.rid:
            refund(0)  # the request that was joined has a hold of its own
            return await self._sessions.join(feeds, served, caller)
        renderer = renderer_of(feeds.rid, view, served.vocabulary, request.prompt_tokens, seal=seal)
        return self._sessions.open(feeds, renderer, caller)

    async def _client_request(self, body: Body | InputsRequest, caller: Caller, served: ServedModel) -> ClientRequest:
        if isinstance(body, InputsRequest):
            return await pooling_request(body, caller, served)
        return await text_request(body, caller, served, self._grammars, strict=self._settings.strict)

    async def _enqueue(self, request: ClientRequest, feeds: Feeds, check_present: Callable[[], None]) -> None:
        """Enqueue every member, and have its feed begin."""
        for member in range(len(request.members)):
            enqueue = request.enqueue(feeds.rid, member, self._settings)
            # Before the enqueue: the first tokens may be published before its answer is here.
            feed = feeds.open(enqueue.rid)
            if enqueue.images:
                await self._stage_images(enqueue)
            enqueued = await self._batches.run(enqueue.model, requests.enqueue(enqueue), check_present)
            if enqueued.rid != enqueue.rid:
                feed = feeds.replace_last(enqueued.rid)
            # A request that was joined may have another seed than the one drawn here.
            ours = feed.rid == enqueue.rid and feeds.rid == request.caller.rid
            feed.begin(enqueue if ours else None)
            feed.position = enqueued.position

    async def _stage_images(self, enqueue: requests.Enqueue) -> None:
        bounds = self._archive.image_bounds
        for piece in requests.stage_images(enqueue.model, enqueue.rid, enqueue.images, enqueue.tenant, bounds):
            await self._batches.run(enqueue.model, piece)

    async def _withdraw(self, model: str, rids: list[str], tenant: str) -> None:
        """End the parts of a request of which another part was refused, whatever its `on_disconnect` says."""
        for rid in rids:
            with suppress(RequestNotFound, RedisUnavailable):
                await self._batches.run(
                    model, requests.cancel(model, rid, tenant, "another part of the request was refused")
                )
