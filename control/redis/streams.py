"""Blocking reads of streams, which distinguish Redis's absence from silence."""

from __future__ import annotations

import time
from typing import Any, cast

from redis import exceptions as redis_errors

from control.errors import KeyDamaged
from control.redis.clients import LONGEST_BLOCK_MS, SyncRedis, unavailable
from control.redis.transient import refusal, wrong_type

BREATH_S = 0.1
"""Pause before a failed read is reported, so that a loop around it does not spin while Redis is away."""

Entry = tuple[str, dict[str, str]]


def read_streams(client: SyncRedis, after: dict[str, str], block_ms: int) -> dict[str, list[Entry]]:
    """Entries after the given ids, waiting up to `block_ms` for the first; an empty dict when none came.

    Use a blocking client. Raises RedisUnavailable.
    """
    try:
        reply: Any = client.xread({**after}, block=max(1, min(block_ms, LONGEST_BLOCK_MS)))
    except (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError) as error:
        time.sleep(BREATH_S)
        raise unavailable(client, error) from error
    except redis_errors.ResponseError as error:
        reason = KeyDamaged(" or ".join(after), "is not a stream") if wrong_type(error) else refusal(error, "XREAD")
        if reason is None:
            raise
        time.sleep(BREATH_S)
        raise reason from error
    return cast(dict[str, list[Entry]], dict(reply or ()))
