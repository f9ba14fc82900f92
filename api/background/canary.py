"""Checks that a model makes tokens: sends a request for one token unless a recent token has shown it."""

from __future__ import annotations

import asyncio
import time

from api.generation.follow import Feeds, Follower
from api.models.models import ModelRegistry, ServedModel
from api.schemas.view import View
from api.settings import ApiSettings
from control import requests
from control.clock import now_ms
from control.errors import FurrowError
from control.messages import GenerationRequest, Input, Sampling
from control.redis.connection import Batches
from control.requests import new_rid

PROVED_FOR_S = 5.0
"""Seconds for which one token counts as proof, the canary's or any client's."""
PATIENCE_S = 4.0
TENANT = "canary"


class Canary:
    """One per process; `check` may be called as often as a probe likes."""

    def __init__(self, batches: Batches, models: ModelRegistry, follower: Follower, settings: ApiSettings) -> None:
        self._batches = batches
        self._models = models
        self._follower = follower
        self._settings = settings
        self._proved: dict[str, float] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def check(self, served: ServedModel) -> str | None:
        """None if the model has made a token in the last five seconds or makes one now; else why not. May take 4 s."""
        async with self._locks.setdefault(served.name, asyncio.Lock()):
            proved = max(self._proved.get(served.name, 0.0), self._follower.last_token(served.name))
            if time.monotonic() - proved < PROVED_FOR_S:
                return None
            try:
                reason = await self._make_token(served)
            except FurrowError as error:
                return str(error)
            if reason is None:
                self._proved[served.name] = time.monotonic()
            return reason

    async def _make_token(self, served: ServedModel) -> str | None:
        """Ask for one token, ahead of the queue. None once it came."""
        await self._follower.subscribe(served.name)
        steps = self._models.steps(served.name)
        feeds = Feeds(self._follower, served.name, TENANT, new_rid())
        feed = feeds.open(feeds.rid)
        try:
            request = self._request(served, feeds.rid)
            await self._batches.run(served.name, requests.enqueue(request))
            feed.begin(request)
            deadline = time.monotonic() + PATIENCE_S
            while (remaining_s := deadline - time.monotonic()) > 0:
                feeds.wake.clear()
                if entries := feed.take():
                    has_output = entries[0].token is not None or entries[0].vector is not None
                    return None if has_output else f"a trial token failed: {entries[0].cause}"
                if feed.error is not None:
                    return f"a trial token failed: {feed.error}"
                await feeds.wait(remaining_s)
            await self._models.look()
            if self._models.steps(served.name) != steps:
                return None  # busy with others' requests: full is not broken
            return f"no token came within {PATIENCE_S:g} s and no step was made, though every rank says it is well"
        finally:
            feeds.leave()

    def _request(self, served: ServedModel, rid: str) -> requests.Enqueue:
        vocabulary = served.vocabulary
        prompt = [vocabulary.bos if vocabulary.bos is not None else 0]
        generates = served.assets.kind == "generate"
        return requests.Enqueue(
            rid=rid,
            model=served.name,
            params=GenerationRequest(
                prompt=prompt,
                sampling=Sampling(max_tokens=int(generates), temperature=0.0, seed="0"),
                inputs=[] if generates else [Input(len(prompt))],
            ),
            tenant=TENANT,
            priority="high",
            deadline_ms=round(PATIENCE_S * 1000),
            api=self._settings.api_id,
            view=View(endpoint="completions", created=int(time.time()), model=served.name).encode(),
            received_ms=now_ms(),
        )
