"""A request's parameters and its token log, read outside scripts and in pages of bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import msgspec

from control.keys import ModelKeys
from control.messages import GenerationRequest, LogEntry, decode_request
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import Call, arun, read, run

PAGE_ENTRIES = 1_000
"""Entries of a log that are read in one call: about a third of a millisecond of the server's time."""

FOLLOW_ENTRIES = 500
"""Entries that `follow` reads inside its script, where each costs three times as much."""

WRITE_ENTRIES = 125
"""Entries that one call writes; each costs several times as much as one that is read."""

decode_entries = msgspec.json.Decoder(list[LogEntry]).decode


def read_params(model: str, rid: str) -> Call[GenerationRequest | None]:
    """The request's parameters; None where the request has ended or is gone."""

    def parse(reply: str | None) -> GenerationRequest | None:
        return None if reply is None else decode_request(reply)

    return read("HGET", ModelKeys(model).request(rid), "params", parse=parse)


def read_log(model: str, rid: str, have: int, most: int = PAGE_ENTRIES) -> Call[list[LogEntry]]:
    """At most `most` entries after seq `have`; empty too when the request is gone (follow tells)."""

    def parse(reply: list[tuple[str, dict[str, str]]] | None) -> list[LogEntry]:
        return decode_entries(f"[{','.join([fields['e'] for _, fields in reply or []])}]")

    return read("XRANGE", ModelKeys(model).log(rid), f"{have + 1}-0", "+", "COUNT", most, parse=parse)


def read_pages(client: SyncRedis, model: str, rid: str, have: int = 0) -> Iterator[list[LogEntry]]:
    """The log after seq `have`, page by page. Raises RedisUnavailable."""
    while page := run(client, read_log(model, rid, have)):
        yield page
        have = page[-1].seq


async def aread_pages(client: AsyncRedis, model: str, rid: str, have: int = 0) -> AsyncIterator[list[LogEntry]]:
    """As `read_pages`, on an asyncio client: the event loop is left to others between two pages."""
    while page := await arun(client, read_log(model, rid, have)):
        yield page
        have = page[-1].seq
