"""The end of a rank process by an error: its log line, its reason in Redis, its exit status."""

from __future__ import annotations

import os
from contextlib import suppress

import structlog

from control.errors import (
    CompilerMissing,
    FurrowError,
    GroupError,
    ModelFilesAway,
    NotMappable,
    RankError,
    RedisUnavailable,
)
from control.messages import Assignment
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas import health
from control.settings import host_id
from worker.rank.exit_codes import LOAD_FAILED, REFUSED

log = structlog.get_logger()

MAY_PASS = (GroupError, RedisUnavailable, ModelFilesAway)
"""Errors after which another start of the same assignment may succeed. A rank that serves waits for Redis, so
RedisUnavailable ends only a rank that starts."""
ENDS_ALIKE = tuple(f"{kind.__name__}:" for kind in (CompilerMissing, NotMappable))
"""The beginnings of a rank's answer to a load that would fail so at each start on this host."""


def exit_status(error: Exception, client: SyncRedis, assignment: Assignment, rank: int) -> int:
    """Store the reason of the end, and return the exit status. Raises `error` again if Furrow does not define it."""
    if not isinstance(error, FurrowError):
        store_reason(client, assignment, rank, f"{type(error).__name__}: {error}")
        raise error
    why = str(error)
    if isinstance(error, RedisUnavailable):
        why = f"Redis went away before the rank was up: {error}"
    store_reason(client, assignment, rank, why)
    if isinstance(error, MAY_PASS) and not _ends_alike(error):
        log.error("could not start", kind=type(error).__name__, error=why, action="rank_exit")
        return LOAD_FAILED
    log.error("refused the assignment", kind=type(error).__name__, error=why, action="rank_exit")
    with suppress(RedisUnavailable):  # the agent poisons the epoch too, when it reaps this process
        epoch = health.read_epoch(client, assignment.spec.name, assignment.replica)
        health.write_poison(client, assignment.spec.name, assignment.replica, epoch, rank, "refused", why)
    return REFUSED


def _ends_alike(error: FurrowError) -> bool:
    """True for a load of which any rank says what each start would meet again. A rank's answer has the error's kind and
    text only."""
    sides = [error.leader, *error.ranks] if isinstance(error, GroupError) else [error]
    return any(isinstance(side, RankError) and side.message.startswith(ENDS_ALIKE) for side in sides)


def store_reason(client: SyncRedis, assignment: Assignment, rank: int, why: str) -> None:
    """Store why this process ends, for its agent, which sees only the exit status."""
    reason = health.EndReason(host=host_id(), pid=os.getpid(), message=why)
    try:
        run_every(client, health.note_end(assignment.spec.name, assignment.replica, rank, reason))
    except RedisUnavailable as error:
        log.warning("reason of the end not stored", error=str(error), action="rank_exit")
