"""Limits of an API key: requests and tokens per minute as buckets that fill evenly, and requests at one time.

A request pays an estimate when it comes (`spend`) and the truth when it ends (`settle`). Whoever dies in between leaves
the estimate: within a minute the bucket is as full as it would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from control.access.record import ApiKey
from control.connection import Call, read
from control.errors import RateLimited
from control.keys import KeyKeys


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of a key's limits; a limit of 0 is none. `reset_*_ms`: until that limit is whole again."""

    limit_requests: int
    remaining_requests: int
    reset_requests_ms: int
    limit_tokens: int
    remaining_tokens: int
    reset_tokens_ms: int


def spend(key: ApiKey, rid: str, model: str, requests: int, tokens: int) -> Call[Allowance]:
    """Take `requests` and an estimate of `tokens` for what begins under `rid`. Sent twice, it takes once.

    Raises RateLimited, and takes nothing, where one of the limits has no room.
    """

    def parse(reply: list[Any]) -> Allowance:
        if reply[0] == "LIMIT":
            bound, wait_ms, *levels = reply[1:]
            limit = {"requests": key.rpm, "tokens": key.tpm, "concurrent": key.max_concurrent}[bound]
            raise RateLimited(bound, limit, int(wait_ms) / 1000, _allowance(key, levels))
        return _allowance(key, reply[1:])

    args = (rid, requests, tokens, key.rpm, key.tpm, key.max_concurrent, model)
    return Call("spend", _named(key, rid), args, parse)


def settle(key: ApiKey, rid: str, requests: int, tokens: int) -> Call[None]:
    """The request has ended and took this much in truth: the estimate is put right. Sent twice, it does so once."""

    def parse(_: int) -> None:
        return None

    return Call("settle", _named(key, rid), (rid, requests, tokens, key.rpm, key.tpm), parse)


def open_requests(key: ApiKey) -> Call[dict[str, tuple[int, str]]]:
    """Of a key with `max_concurrent`: rid → (ms at which it began, model) of what holds its places."""

    def parse(reply: dict[str, str]) -> dict[str, tuple[int, str]]:
        pairs = {rid: text.split(" ", 1) for rid, text in reply.items()}
        return {rid: (int(began), model) for rid, (began, model) in pairs.items()}

    return read("HGETALL", KeyKeys(key.id).open, parse=parse)


def free_places(key: ApiKey, rids: Sequence[str]) -> Call[int]:
    """Requests that have ended hold their places no longer, though nobody settled them; their estimates stand."""
    return read("HDEL", KeyKeys(key.id).open, *rids, parse=int)


def _named(key: ApiKey, rid: str) -> tuple[str, ...]:
    named = KeyKeys(key.id)
    return named.bucket, named.spent(rid), named.open


def _allowance(key: ApiKey, levels: list[Any]) -> Allowance:
    requests, requests_ms, tokens, tokens_ms = map(int, levels)
    return Allowance(key.rpm, requests, requests_ms, key.tpm, tokens, tokens_ms)
