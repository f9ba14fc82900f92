"""The stored responses as one API process reads and writes them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import structlog

from api.settings import ApiSettings
from control.batches import Batches
from control.connection import Call
from control.errors import RedisUnavailable, RequestError, RequestNotFound
from control.responses import (
    StoredResponse,
    close_response,
    drop_response,
    end_response,
    keep_response,
    read_response,
    refresh_response,
)

log = structlog.stdlib.get_logger(__name__)

MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Of one response's input items; what is larger is served, but not stored."""
MAX_CHAIN = 1000
"""Responses that one conversation may have in a row."""

_LANE = "responses"

_ID = re.compile(r"(?:resp|msg|rs|fc|fco)_([0-9a-f]{32})(?:_\w+)?")


def rid_of(identity: str) -> str:
    """The request that a response's or an item's id is derived from; "" for an id that this server did not make."""
    match = _ID.fullmatch(identity)
    return match[1] if match is not None else ""


class Archive:
    """Reads and writes records; `ttl_ms` is 0 where nothing is to be stored."""

    def __init__(self, batches: Batches, settings: ApiSettings) -> None:
        self._batches = batches
        self.ttl_ms = round(settings.response_ttl * 1000)

    def check_size(self, items: list[Any]) -> None:
        """Raises RequestError for an input that is too large to be stored."""
        size = len(msgspec.json.encode(items))
        if size > MAX_RECORD_BYTES:
            raise RequestError(
                f"The input has {size} bytes, and at most {MAX_RECORD_BYTES} are stored with a response. "
                "Send it with 'store': false, or send less.",
                param="store",
            )

    async def accept(self, stored: StoredResponse) -> None:
        """Keep what was asked; from here on somebody completes it, whatever becomes of this process."""
        await self._all(keep_response(stored, self.ttl_ms))

    async def complete(self, rid: str, response: bytes) -> bytes:
        """Write the end of a response and return what is stored; others write it where Redis is away now."""
        try:
            written = await self._batches.run(_LANE, end_response(rid, response, self.ttl_ms))
            await self._batches.run(_LANE, close_response(rid))
        except RedisUnavailable as error:
            log.warning("could not store a response yet", action="store_response", rid=rid, error=str(error))
            return response
        return written or response

    async def look_up(self, identity: str, tenant: str, param: str | None = None) -> StoredResponse:
        """Raises RequestNotFound for a response that is unknown, expired, deleted, or another tenant's."""
        found = await self.find(rid_of(identity), tenant) if identity.startswith("resp_") else None
        if found is None:
            raise RequestNotFound(
                f"Response with id '{identity}' not found. It may have been sent with 'store': false, deleted, or "
                f"have ended more than {self.ttl_ms / 3_600_000:g} hours ago.",
                param=param,
                code="response_not_found",
            )
        return found

    async def referred(self, identity: str, tenant: str) -> StoredResponse | None:
        """The record that an item's id was derived from, or None."""
        return await self.find(rid_of(identity), tenant)

    async def find(self, rid: str, tenant: str) -> StoredResponse | None:
        """The record of a request, or None where the tenant has none."""
        found = await self._batches.run(_LANE, read_response(rid)) if rid else None
        return found if found is not None and found.tenant == tenant else None

    async def chain(self, last: StoredResponse, param: str) -> list[StoredResponse]:
        """The responses that `last` continues, oldest first, and itself. They all live on from now.

        Raises RequestNotFound naming the first that is gone.
        """
        if len(last.chain) >= MAX_CHAIN:
            raise RequestError(f"A conversation may have {MAX_CHAIN} responses; begin another one.", param=param)
        rids = last.chain
        found: list[StoredResponse | None] = await self._all([read_response(rid) for rid in rids])
        for rid, record in zip(rids, found, strict=True):
            if record is None or record.tenant != last.tenant:
                raise RequestNotFound(
                    f"Response with id 'resp_{rid}', which 'resp_{last.rid}' continues, is gone.",
                    param=param,
                    code="response_not_found",
                )
        await self._all([refresh_response(rid, self.ttl_ms) for rid in [*rids, last.rid]])
        return [*(record for record in found if record is not None), last]

    async def drop(self, rid: str) -> None:
        await self._all(drop_response(rid))

    async def _all(self, calls: list[Call[Any]]) -> list[Any]:
        outcomes = await self._batches.run_all(_LANE, calls)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes
