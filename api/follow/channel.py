"""The live half of following: one subscription per model, kept through every break of the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from control import keys
from control.errors import RedisUnavailable
from control.messages import EventRow, decode_event
from control.redis.clients import AsyncRedis
from control.redis.outage import outage

log = structlog.stdlib.get_logger(__name__)

_CONFIRM_S = 1.0
_PATIENCE_S = 1.0
"""After so long without a message the server is asked whether it is there, and has as long to answer."""


class EventChannel:
    """Hears what leaders publish for this API process. Delivery is at most once: nothing may depend on it."""

    def __init__(
        self,
        client: AsyncRedis,
        api_id: str,
        on_event: Callable[[str, list[EventRow]], None],
        on_break: Callable[[], None],
    ) -> None:
        """`on_event(model, rows)` for each event, `on_break()` whenever events may have been missed."""
        self._client = client
        self._pubsub = client.pubsub()
        self._api_id = api_id
        self._on_event, self._on_break = on_event, on_break
        self._confirmed: dict[str, asyncio.Event] = {}
        self._wanted = asyncio.Event()

    async def subscribe(self, model: str) -> None:
        """Be sure that the model's events are heard. Must come before a request is enqueued."""
        channel = keys.ModelKeys(model).events(self._api_id)
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            confirmed = self._confirmed[channel] = asyncio.Event()
            try:
                await self._pubsub.subscribe(channel)
            except (RedisError, OSError) as error:
                self._confirmed.pop(channel, None)
                raise RedisUnavailable(f"could not subscribe to the events of '{model}': {error}") from error
            self._wanted.set()
        if confirmed.is_set():
            return
        # Without a confirmation the log still has everything, only later: go on.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONFIRM_S):
                await confirmed.wait()

    async def listen(self) -> None:
        """Hear until cancelled."""
        await self._wanted.wait()
        while True:
            try:
                await self._hear()
                outage.goes_on("events")
            except (RedisError, OSError) as error:
                outage.waits("events", error)
                await self._resubscribe()

    async def _hear(self) -> None:
        """One message, or a proof that silence is not a connection that leads nowhere, which resets nothing."""
        message = await self._message()
        if message is None:
            await self._pubsub.ping()
            message = await self._message()
            if message is None:
                raise RedisConnectionError("the event channel does not answer")
        self._receive(message["type"], message["channel"], message["data"])

    async def _message(self) -> dict[str, Any] | None:
        return await self._pubsub.get_message(timeout=_PATIENCE_S)  # type: ignore[return-value]

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.aclose()

    def _receive(self, kind: str, channel: str, data: str) -> None:
        if kind == "subscribe":
            if channel in self._confirmed:
                self._confirmed[channel].set()
        elif kind == "message":
            model = channel.removeprefix(f"{keys.PREFIX}{{").partition("}:")[0]
            try:
                rows = decode_event(data)
            except msgspec.DecodeError as error:
                # Whatever it was meant to say is in the log.
                log.error("an event could not be read", action="bad_event", model=model, error=str(error))
                return
            self._on_event(model, rows)

    async def _resubscribe(self) -> None:
        """Come back to every channel, for as long as it takes; what was missed is in the logs."""
        wait = 0.05
        while True:
            try:
                await self._pubsub.aclose()
                self._pubsub = self._client.pubsub()  # of a Cluster: another node's
                await self._pubsub.subscribe(*self._confirmed)
                break
            except (RedisError, OSError):
                await asyncio.sleep(wait)
                wait = min(1.0, wait * 2)
        self._on_break()
