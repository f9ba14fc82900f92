"""Requests that were enqueued before, by any API process: found by their ids, and followed."""

from __future__ import annotations

import asyncio

import structlog

from api.generation.session import Caller, Session, Sessions, Shutdown
from api.http.errors import ShuttingDown
from api.models.models import Models, ServedModel
from api.schemas.view import Cursor, decode_view
from api.settings import ApiSettings
from control import requests
from control.errors import ModelNotFound, RequestError, RequestNotFound
from control.redis.batches import Batches
from control.requests import member_rid

log = structlog.stdlib.get_logger(__name__)

_LOOK_AGAIN_S = 0.2


class ExistingRequests:
    """Finds and follows requests that exist already."""

    def __init__(
        self,
        batches: Batches,
        models: Models,
        sessions: Sessions,
        settings: ApiSettings,
        shutdown: Shutdown,
    ) -> None:
        self._batches = batches
        self._models = models
        self._sessions = sessions
        self._settings = settings
        self._shutdown = shutdown

    async def find(self, rid: str, tenant: str, model: str | None = None) -> tuple[ServedModel, dict[str, str]]:
        """The model and the hash of a request; looks in every model unless one is named, whatever its state. Raises
        RequestNotFound, and as `Models.resolve`."""
        served = None
        if model is not None:
            served = await self._models.find(self._models.real_name(model)) or await self._models.resolve(model)
        places = [served] if served is not None else await self._models.all_served()
        looks = [self._batches.run(place.name, requests.follow(place.name, rid, "", tenant, 2**40)) for place in places]
        for place, outcome in zip(places, await asyncio.gather(*looks, return_exceptions=True), strict=True):
            if isinstance(outcome, requests.Followed):
                return place, outcome.fields
            if not isinstance(outcome, RequestNotFound):
                raise outcome
        raise RequestNotFound(f"No request {rid!r}. It may have ended more than its retention ago.")

    async def find_in(self, rid: str, tenant: str, model: str) -> tuple[ServedModel | None, dict[str, str]]:
        """As `find`, for a model that need not serve any more: None where its vocabulary is gone. Raises
        RequestNotFound, or ModelUnavailable where Redis has lost the model and may have lost the request."""
        try:
            followed = await self._batches.run(model, requests.follow(model, rid, "", tenant, 2**40))
        except RequestNotFound:
            self._models.check_lost(model)
            raise
        return await self._models.find(model), followed.fields

    async def resume(self, cursor: Cursor, caller: Caller, model: str | None) -> Session:
        """Follow a request from the places of the cursor, or from its beginning if it has none.

        Places prove that the request existed. If it is gone, Redis may have lost it a moment ago: another process that
        follows it gets the time to bring it back. Raises RequestNotFound if it is gone, or another tenant's.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        wait = self._settings.lost_wait if cursor.places else 0.0
        logged = False
        while True:
            try:
                return await self._follow(cursor, caller, model)
            except (RequestNotFound, ModelNotFound) as error:
                if clock() - began >= wait:
                    raise
                if not logged:
                    log.info("waits for a lost request", action="await_lost", rid=cursor.rid, why=str(error))
                    logged = True
            if self._shutdown.interrupted:
                raise ShuttingDown("This API process is shutting down. Send the request to another one.")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _follow(self, cursor: Cursor, caller: Caller, model: str | None) -> Session:
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
        feeds = await self._sessions.feeds(served.name, caller.tenant, cursor.rid)
        for member in range(view.members):
            feeds.open(member_rid(cursor.rid, member))
        caller.request_log.know(model=served.name, resumed=True)
        return await self._sessions.join(feeds, served, caller, cursor)
