"""Reports of API processes to operators: requests that ended, and files of models that broke their bounds.

The newest requests of all processes together are kept for an hour, the breaches of a model until an hour after its
last one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from control import keys
from control.clock import now_ms
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every, write

KEPT_S = 3600
"""The time for which an ended request, or the last breach of a file, is shown."""
MOST = 5_000
"""Records of all processes; Redis may keep some more."""
LONGEST_ERROR = 300
"""Characters of a cause."""


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`status` is what the client saw, 499 where it left; `first_ms` is the time of its first token."""

    id: str
    path: str
    status: int
    ended_ms: int
    total_ms: int
    model: str = ""
    tenant: str = ""
    key: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_ms: int | None = None
    error: str = ""

    @property
    def failed(self) -> bool:
        """True for a refusal, an error, and a client that left."""
        return self.status >= 400


def note(records: Sequence[EndedRequest]) -> list[Call[str]]:
    """Keep these records; the oldest of all give way. Sent twice they are kept twice, and shown once."""
    additions = [
        read("XADD", keys.ENDED, "MAXLEN", "~", MOST, "*", "record", msgspec.json.encode(record).decode(), parse=str)
        for record in records
    ]
    return [*additions, read("PEXPIRE", keys.ENDED, KEPT_S * 1000, parse=str)]


def ended(
    client: SyncRedis, limit: int, model: str | None = None, tenant: str | None = None, failed: bool | None = None
) -> list[EndedRequest]:
    """Up to `limit` requests that ended in the last hour, the newest first; of one model or tenant, or those that
    failed or did not. Raises RedisUnavailable."""
    since = now_ms() - KEPT_S * 1000
    records = run(client, read("XREVRANGE", keys.ENDED, "+", since, "COUNT", MOST, parse=_records))
    distinct = {(record.id, record.ended_ms): record for record in records}.values()
    fitting = [
        record
        for record in distinct
        if (model is None or record.model == model)
        and (tenant is None or record.tenant == tenant)
        and (failed is None or record.failed == failed)
    ]
    return fitting[:limit]


def _records(reply: list[tuple[str, dict[str, str]]]) -> list[EndedRequest]:
    return [msgspec.json.decode(fields["record"], type=EndedRequest) for _, fields in reply]


CALLS = "calls"
"""In place of a file: the form in which the model writes calls of tools is not known to an API process."""


class Breach(msgspec.Struct, frozen=True):
    """A file, as "chat template", what it did, and when, in Unix seconds."""

    file: str
    deed: str
    at: int


def note_breach(client: SyncRedis, model: str, file: str, deed: str) -> None:
    """Keep the latest breach of each file. Raises RedisUnavailable."""
    key = keys.ModelKeys(model).breaches
    value = msgspec.json.encode(Breach(file, deed[:200], int(time.time())))
    run_every(
        client,
        [write("HSET", key, file, value, parse=int), write("PEXPIRE", key, KEPT_S * 1000, parse=int)],
    )


def breaches_of(client: SyncRedis, models: list[str]) -> dict[str, list[Breach]]:
    """By model, the latest breach of each file. Raises RedisUnavailable."""
    calls = [read("HVALS", keys.ModelKeys(model).breaches, parse=_breaches) for model in models]
    return dict(zip(models, run_every(client, calls), strict=True))


def _breaches(values: list[bytes | str]) -> list[Breach]:
    return sorted((msgspec.json.decode(value, type=Breach) for value in values), key=lambda breach: breach.file)
