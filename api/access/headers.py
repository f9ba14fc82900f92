"""x-ratelimit headers, in OpenAI's names and formats."""

from __future__ import annotations

from control.access import Allowance


def ratelimit_headers(allowance: Allowance) -> dict[str, str]:
    """What is left of each limit that the key has; nothing is told of one that it has not."""
    headers: dict[str, str] = {}
    for what, limit, remaining, reset_ms in (
        ("requests", allowance.limit_requests, allowance.remaining_requests, allowance.reset_requests_ms),
        ("tokens", allowance.limit_tokens, allowance.remaining_tokens, allowance.reset_tokens_ms),
    ):
        if limit:
            headers[f"x-ratelimit-limit-{what}"] = str(limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(remaining)
            headers[f"x-ratelimit-reset-{what}"] = duration(reset_ms)
    return headers


def duration(ms: int) -> str:
    """As Go writes it: `0s`, `120ms`, `1.5s`, `6m0s`, `1h0m3.25s`."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, rest = divmod(ms, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{seconds}s"
