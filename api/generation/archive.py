"""The stored responses as one API process reads and writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import structlog

from api.http.gate import Identity
from api.http.turns import off_loop
from api.settings import ApiSettings
from control.constants import RESPONSE_OVERHEAD
from control.errors import RedisUnavailable, RequestError, RequestNotFound
from control.records.responses import (
    Quota,
    StoredResponse,
    Trimmed,
    ancestors,
    close_response,
    drop_response,
    end_response,
    keep_response,
    list_chat,
    note_bytes,
    read_response,
    trim_responses,
    use_responses,
    watch_response,
)
from control.redis.connection import Batches, Call
from control.redis.servers import ServerMemory
from control.requests.enqueue import ImageBounds
from control.sizes import in_words

log = structlog.stdlib.get_logger(__name__)

MAX_RECORD_BYTES = 4 * 1024 * 1024
"""Of one response's input and options; what is larger is served, but not stored."""
MAX_CHAIN = 1000
"""Responses that one conversation may have in a row."""
MAX_CHAIN_BYTES = 16 * 1024 * 1024
"""Of all stored responses of one conversation: they are read whole for each continuation."""
STORED_SHARE = 4
"""One part in so many of Redis' memory may be used for stored responses, and one in so many of that by one owner."""
IMAGES_SHARE = 8
"""One part in so many of Redis' memory may be used for the images of a model's requests, half of it by one tenant."""
_UNKNOWN_MEMORY = 4 * 1024**3
"""Assumed where the server does not show what it has."""
_USUAL_OPTIONS_BYTES = 64 * 1024
"""Assumed for what a response repeats of its request, before that is known."""
_READ_BYTES = 1024 * 1024
"""Of a conversation's records that are read and decoded before the event loop has its turn; at least one record."""
_MOST_CALLS = 10_000
"""Batches of old responses that may have to go before one new one is stored."""

_LANE = "responses"

_ID = re.compile(r"(?:resp|msg|rs|fco?|ctco?|lsho?|sho?|apco?|cmp)_([0-9a-f]{32})(?:_\w+)?")


def rid_of(identity: str) -> str:
    """The request that a response's or an item's id is derived from; "" for an id that this server did not make."""
    match = _ID.fullmatch(identity)
    return match[1] if match is not None else ""


class Archive:
    """Reads and writes records; `ttl_ms` is 0 where nothing is to be stored."""

    def __init__(self, batches: Batches, settings: ApiSettings) -> None:
        self._batches = batches
        self.ttl_ms = round(settings.response_ttl * 1000)
        self._owner_bytes = settings.response_bytes
        self._number = settings.response_number
        self.quota = Quota(settings.response_bytes or _UNKNOWN_MEMORY // STORED_SHARE**2, settings.response_number)
        """Of each owner, as things are now."""
        self.image_bounds = _image_bounds(_UNKNOWN_MEMORY)
        """Of requests' images, as things are now."""

    def share_out(self, servers: Sequence[ServerMemory], owners: int) -> None:
        """Set the quota from Redis' memory and from how many owners share what there is for all."""
        memory = min((server.most or server.machine // STORED_SHARE for server in servers), default=0)
        together = (memory or _UNKNOWN_MEMORY) // STORED_SHARE
        self.image_bounds = _image_bounds(memory or _UNKNOWN_MEMORY)
        each = self._owner_bytes or together // STORED_SHARE
        self.quota = Quota(min(each, together // max(1, owners)), self._number)

    @property
    def limits(self) -> str:
        """The quota in words."""
        return f"the quota is {in_words(self.quota.bytes)} and {self.quota.number} responses"

    def takes(self, items: list[Any]) -> bool:
        """True if an input of these items is not too large to be stored with options of a usual size."""
        return _record_bytes(items, {}) + _USUAL_OPTIONS_BYTES <= min(MAX_RECORD_BYTES, self.quota.bytes)

    def check_size(self, items: list[Any], options: dict[str, Any]) -> None:
        """Raises RequestError for an input that is too large to be stored with what the response repeats of it."""
        most = min(MAX_RECORD_BYTES, self.quota.bytes)
        if (size := _record_bytes(items, options)) > most:
            raise RequestError(
                f"Input and options have {size} bytes, and at most {most} are stored with a response. "
                "Send it with 'store': false, or send less.",
                param="store",
            )

    async def accept(self, stored: StoredResponse, created_ms: int = 0) -> None:
        """Keep what was asked; from here on a process completes it, whatever becomes of this one."""
        if stored.params:
            stored = await off_loop(len(stored.params), self._with_room, stored)
        words: list[Call[Any]] = watch_response(stored.rid, stored.owner, stored.kind)
        if stored.kind == "chat":
            words += list_chat(stored.rid, stored.owner, created_ms, self.ttl_ms, self._number)
        for _ in range(_MOST_CALLS):
            keep = keep_response(stored, self.ttl_ms, self.quota)
            stays, *_ = await self._batches.run_every(_LANE, [keep, *words])
            if stays:
                return
        raise RedisUnavailable("there is no room for another stored response")

    def _with_room(self, stored: StoredResponse) -> StoredResponse:
        """Without its parameters where they make the record too large."""
        size = len(stored.params) + len(stored.view) + _record_bytes(stored.input, {})
        fits = size + len(stored.metadata) <= min(MAX_RECORD_BYTES, self.quota.bytes)
        return stored if fits else replace(stored, params=b"")

    async def complete(self, rid: str, owner: str, response: bytes, entries: bytes = b"") -> bytes:
        """Write the end of a response and return what is stored; others write it where Redis is away now. `entries`:
        the token log of a chat, as `end_response` takes it."""
        entries = entries if len(entries) <= MAX_RECORD_BYTES else b""
        ended = end_response(rid, owner, response, self.ttl_ms, self.quota, entries)
        try:
            archived = await self._batches.run(_LANE, ended)
            await self._batches.run_every(_LANE, close_response(rid, owner))
        except RedisUnavailable as error:
            log.warning("could not store a response yet", action="store_response", rid=rid, error=str(error))
            return response
        return archived or response

    async def look_up(self, identity: str, who: Identity, param: str | None = None) -> StoredResponse:
        """Raises RequestNotFound for a response that is unknown, expired, deleted, or another tenant's."""
        stored = await self.find(identity, who) if identity.startswith("resp_") else None
        if stored is None:
            raise self._not_found(f"Response with id '{identity}' not found", param)
        return stored

    def _not_found(self, text: str, param: str | None) -> RequestNotFound:
        return RequestNotFound(
            f"{text}. It may have been sent with 'store': false, been deleted, have ended more than "
            f"{self.ttl_ms / 3_600_000:g} hours ago, or have been removed to store newer ones ({self.limits}).",
            param=param,
            code="response_not_found",
        )

    async def find(self, identity: str, who: Identity) -> StoredResponse | None:
        """The record for the id of a response, or of an item of it; None where the tenant has none."""
        rid = rid_of(identity)
        stored = await self._batches.run(_LANE, read_response(rid, who.owner)) if rid else None
        return stored if stored is not None and stored.tenant == who.tenant and stored.kind == "response" else None

    async def chain(self, last: StoredResponse, param: str) -> list[StoredResponse]:
        """The responses that `last` continues, oldest first, and itself. They all live on from now.

        Raises RequestNotFound naming the newest that is gone, and RequestError for a conversation that is too long.
        """
        records: list[StoredResponse | None] = []
        rids: list[str] = []
        for page in _pages(await self._ancestors(last, param)):
            records += await self._batches.run_every(_LANE, [read_response(rid, last.owner) for rid in page])
            rids += page
        for rid, record in zip(rids, records, strict=True):
            if record is None or record.tenant != last.tenant:
                text = f"Response with id 'resp_{rid}', which 'resp_{last.rid}' continues, is gone"
                raise self._not_found(text, param)
        await self._batches.run_every(_LANE, use_responses([*rids, last.rid], last.owner, self.ttl_ms))
        return [*(record for record in records if record is not None), last]

    async def _ancestors(self, last: StoredResponse, param: str) -> list[tuple[str, int]]:
        """The rids of the responses that `last` continues, oldest first, with their sizes in bytes."""
        sizes = list[tuple[str, int]]()
        ask = last.rid
        while ask and len(sizes) <= MAX_CHAIN and sum(size for _, size in sizes) <= MAX_CHAIN_BYTES:
            page = await self._batches.run(_LANE, ancestors(ask, last.owner))
            sizes += zip(page.rids, page.sizes, strict=True)
            ask = page.next
        if len(sizes) > MAX_CHAIN:
            raise RequestError(f"A conversation may have {MAX_CHAIN} responses; begin another one.", param=param)
        if sum(size for _, size in sizes) > MAX_CHAIN_BYTES:
            raise RequestError(
                f"The stored responses of this conversation take more than {in_words(MAX_CHAIN_BYTES)}; begin another "
                "one.",
                param=param,
            )
        return sizes[:0:-1]

    async def drop(self, rid: str, owner: str) -> None:
        await self._batches.run_every(_LANE, drop_response(rid, owner))

    async def trim(self, owner: str) -> None:
        """Delete an owner's least recently used responses beyond its quota, and record its bytes for operators."""
        stored = Trimmed(False, 0, 0)
        for _ in range(_MOST_CALLS):
            stored = await self._batches.run(_LANE, trim_responses(owner, self.quota))
            if stored.done:
                break
        await self._batches.run_every(_LANE, note_bytes(owner, stored))


def _image_bounds(memory: int) -> ImageBounds:
    return ImageBounds(memory // IMAGES_SHARE, memory // IMAGES_SHARE // 2)


def _record_bytes(items: list[Any], options: dict[str, Any]) -> int:
    return len(msgspec.json.encode(items)) + len(msgspec.json.encode(options)) + 2 * RESPONSE_OVERHEAD


def _pages(sized: list[tuple[str, int]]) -> Iterator[list[str]]:
    """The rids in pages of at most `_READ_BYTES` together."""
    page = list[str]()
    total = 0
    for rid, size in sized:
        if page and total + size > _READ_BYTES:
            yield page
            page = []
            total = 0
        page.append(rid)
        total += size
    if page:
        yield page
