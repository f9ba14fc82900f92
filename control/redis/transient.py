"""Answers of a server that is there and can't serve just now: loading, out of memory, a failed save, a replica, or a
user without the right."""

from __future__ import annotations

import re

from redis import exceptions as redis_errors

from control.errors import RedisDenied, RedisFull, RedisUnavailable

_TYPES = (
    redis_errors.BusyLoadingError,
    redis_errors.OutOfMemoryError,
    redis_errors.ReadOnlyError,
    redis_errors.MasterDownError,
    redis_errors.ClusterDownError,
    redis_errors.TryAgainError,
    redis_errors.AskError,
)
"""Errors that redis-py reports by type; it removes the first word from their text."""
_TEXT = re.compile(
    # At the beginning, or behind the dash that Redis 6.2 puts before an error inside a script.
    r"(?:^|-)(?:LOADING|OOM|MISCONF|READONLY|BUSY|MASTERDOWN|NOREPLICAS|CLUSTERDOWN|TRYAGAIN|UNBLOCKED) "
    # While a slot moves between shards, a script finds some of its keys gone already.
    r"|attempted to access a non local key|while the cluster is down"
)
_DENIED = re.compile(
    # In a script too, whose words differ between Redis 6.2, Redis 7 and Valkey.
    r"(?:^|-)NOPERM |no permission|user executing the script can't|ACL failure",
    re.IGNORECASE,
)
_FULL = re.compile(r"(?:^|-)OOM ")


def refusal(error: Exception, command: str) -> RedisUnavailable | None:
    """The error for a refusal of `command` that the caller can wait out or an operator can mend; None for another."""
    if out_of_memory(error):
        return RedisFull()
    if lacks_right(error):
        return RedisDenied(str(error))
    if transient(error):
        return RedisUnavailable(f"Redis can't serve {command} just now: {error}")
    return None


def transient(error: Exception) -> bool:
    """True if the same command may succeed later, by itself or after the operator repaired the server."""
    return isinstance(error, _TYPES) or _TEXT.search(str(error)) is not None


def out_of_memory(error: Exception) -> bool:
    """True if the server refused a write because it has reached its maxmemory."""
    return isinstance(error, redis_errors.OutOfMemoryError) or _FULL.search(str(error)) is not None


def wrong_type(error: Exception) -> bool:
    """True if a key has another type than the command is for."""
    return "WRONGTYPE " in str(error)


def lacks_right(error: Exception) -> bool:
    """True if the server's user lacks a right to the command, a key or a channel."""
    return isinstance(error, redis_errors.NoPermissionError) or _DENIED.search(str(error)) is not None
