"""Usage per key, model and day. The script that ends a request counts it, so no request is lost or counted twice.

The counts of a model lie in its own slot, one hash for each UTC day, with a field per key and kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta

import msgspec

from control import keys
from control.keys import ModelKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every

KINDS = ("requests", "prompt", "cached", "completion")
_EPOCH = date(1970, 1, 1)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one model by one key on one day (UTC); `cached_tokens` of the prompts' tokens were not computed."""

    key: str
    date: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def days(count: int) -> list[date]:
    """The last `count` days, today (UTC) included, oldest first."""
    today = datetime.now(UTC).date()
    return [today - timedelta(days=back) for back in reversed(range(count))]


def usage_of_key(model: str, key: str, day: date) -> Call[Usage | None]:
    """One key's; None where it did nothing."""

    def parse(reply: Sequence[str | None]) -> Usage | None:
        counts = [int(value or 0) for value in reply]
        return _usage(key, model, day, counts) if any(counts) else None

    fields = [f"{key}:{kind}" for kind in KINDS]
    return read("HMGET", ModelKeys(model).usage(_number(day)), *fields, parse=parse)


def usage_of_day(model: str, day: date) -> Call[list[Usage]]:
    """Every key's, in order of id."""

    def parse(reply: dict[str, str]) -> list[Usage]:
        named = sorted({field.rpartition(":")[0] for field in reply})
        counts = {key: [int(reply.get(f"{key}:{kind}", 0)) for kind in KINDS] for key in named}
        return [_usage(key, model, day, counts[key]) for key in named]

    return read("HGETALL", ModelKeys(model).usage(_number(day)), parse=parse)


def usage(client: SyncRedis, count: int, key: str | None = None) -> list[Usage]:
    """Of the last `count` days, oldest first: one key's, or everybody's. Raises RedisUnavailable."""
    models = sorted(run(client, metered_models()))
    if key is not None:
        days_of_models = run_every(client, [usage_of_key(model, key, day) for day in days(count) for model in models])
        return [one for one in days_of_models if one is not None]
    days_of_models = run_every(client, [usage_of_day(model, day) for day in days(count) for model in models])
    return [one for some in days_of_models for one in some]


def metered_models() -> Call[set[str]]:
    """Every model that was ever loaded, unloaded ones included: their usage still counts."""
    return read("SMEMBERS", keys.METERED, parse=set)


def _number(day: date) -> int:
    return (day - _EPOCH).days


def _usage(key: str, model: str, day: date, counts: list[int]) -> Usage:
    requests, prompt, cached, completion = counts
    return Usage(
        key=key,
        date=day.isoformat(),
        model=model,
        requests=requests,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
    )
