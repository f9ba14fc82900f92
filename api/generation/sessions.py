"""Opens the sessions of this process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from api.access.limits import Settler
from api.access.seals import Seals
from api.follow.follow import Feeds, Follower
from api.generation.archive import Archive
from api.generation.caller import Caller
from api.generation.session import Session
from api.models.served import ServedModel
from api.observability.request_log import WaitLog
from api.rendering.chunks import StreamRenderer
from api.rendering.event_rendering import renderer_of
from api.schemas.view import Cursor, decode_view
from api.settings import ApiSettings

log = structlog.stdlib.get_logger(__name__)


class Sessions:
    """Opens the sessions of new requests, and of those that another client or process began."""

    def __init__(
        self,
        follower: Follower,
        archive: Archive,
        seals: Seals,
        settler: Settler,
        waits: WaitLog,
        settings: ApiSettings,
        interrupted: Callable[[], bool],
    ) -> None:
        self._follower, self._archive, self._seals, self._settler = follower, archive, seals, settler
        self._waits, self._settings, self._interrupted = waits, settings, interrupted

    async def feeds(self, model: str, tenant: str, rid: str) -> Feeds:
        """Feeds for the answer `rid`, without a member yet; the model's events are heard from now on."""
        await self._follower.subscribe(model)
        return Feeds(self._follower, model, tenant, rid)

    def open(self, feeds: Feeds, renderer: StreamRenderer, caller: Caller) -> Session:
        identity = caller.identity
        self._waits.add(caller.request_log, feeds)
        return Session(
            feeds=feeds,
            renderer=renderer,
            caller=caller,
            settings=self._settings,
            interrupted=self._interrupted,
            complete=partial(self._archive.complete, feeds.rid, identity.owner),
            settle_limits=partial(self._settler.nudge, feeds.model) if identity.limited else None,
        )

    async def join(self, feeds: Feeds, served: ServedModel, caller: Caller, cursor: Cursor | None = None) -> Session:
        """The session of a request that runs already, shown by its own view."""
        caller.request_log.know(rid=feeds.rid)
        await feeds.meet()
        log.info(
            "took up a request that another client or process began",
            action="take_up",
            rid=feeds.rid,
            model=served.name,
        )
        view = decode_view(feeds.members[0].fields["view"])
        prompt_tokens = sum(int(feed.fields["prompt_tokens"]) for feed in feeds.members)
        caller.request_log.know(prompt_tokens=prompt_tokens)
        seal = await self._seals.sealer(feeds.tenant) if view.sealed else None
        renderer = renderer_of(feeds.rid, view, served.vocabulary, prompt_tokens, cursor, seal)
        return self.open(feeds, renderer, caller)
