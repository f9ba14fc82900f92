"""The rest of a key's limits as headers, in OpenAI's and in Anthropic's names and formats."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator

from control.access import Allowance


def ratelimit_headers(allowance: Allowance) -> dict[str, str]:
    """As OpenAI has them; nothing is told of a limit that the key has not."""
    headers: dict[str, str] = {}
    for what, limit, remaining, reset_ms in _limits(allowance):
        headers[f"x-ratelimit-limit-{what}"] = str(limit)
        headers[f"x-ratelimit-remaining-{what}"] = str(remaining)
        headers[f"x-ratelimit-reset-{what}"] = duration(reset_ms)
    return headers


def anthropic_ratelimit_headers(allowance: Allowance, now_s: float) -> dict[str, str]:
    """The same as Anthropic has them; `now_s` in Unix seconds."""
    headers: dict[str, str] = {}
    for what, limit, remaining, reset_ms in _limits(allowance):
        headers[f"anthropic-ratelimit-{what}-limit"] = str(limit)
        headers[f"anthropic-ratelimit-{what}-remaining"] = str(remaining)
        headers[f"anthropic-ratelimit-{what}-reset"] = moment(now_s + reset_ms / 1000)
    return headers


def _limits(allowance: Allowance) -> Iterator[tuple[str, int, int, int]]:
    """Name, limit, what is left, and milliseconds until it is whole, of each limit that there is."""
    if allowance.limit_requests:
        yield "requests", allowance.limit_requests, allowance.remaining_requests, allowance.reset_requests_ms
    if allowance.limit_tokens:
        yield "tokens", allowance.limit_tokens, allowance.remaining_tokens, allowance.reset_tokens_ms


def moment(unix_s: float) -> str:
    """The next whole second in UTC, as RFC 3339 writes it: a client that retries then is not too early."""
    at = datetime.datetime.fromtimestamp(math.ceil(unix_s), datetime.UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def duration(ms: int) -> str:
    """As Go writes it: `0s`, `120ms`, `1.5s`, `6m0s`, `1h0m3.25s`."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"
