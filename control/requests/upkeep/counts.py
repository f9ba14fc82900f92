"""Counts of what waits that disagree with the queues, as a fault may leave them: counted anew, and put right.

The queues are counted page by page while requests come and go. The correction is one script for each batch of tenants,
and is refused if anything has begun or ceased to wait since the count began.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from control.backoff import doubling
from control.constants import HAND_OUT
from control.errors import RedisUnavailable
from control.keys import CLASSES, ModelKeys
from control.redis.clients import SyncRedis
from control.redis.connection import Call, read, run, run_every

log = structlog.get_logger()

PAUSES_S = doubling(0.1, 12.8)
"""Pauses after the tries to count."""
PAGE = 256
"""Entries of a queue, or tenants of a set, that one call looks at."""
AT_ONCE = 32
"""Calls in one round trip."""

_CHANGES = ("enqueued", "claimed", "moved")
Flow = tuple[str, str]
"""A class and a tenant."""


@dataclass
class _Queue:
    """Counts of the requests that wait in one queue, and its length including those that run."""

    requests: int = 0
    tokens: int = 0
    sequences: int = 0
    length: int = 0


@dataclass
class QueueCounts:
    """A model's queues as they were counted, and the load's change counters before that."""

    changes: list[int]
    queues: dict[Flow, _Queue] = field(default_factory=dict[Flow, _Queue])
    wrong: list[Flow] = field(default_factory=list[Flow])
    """Flows whose count of sequences, or whose turns, say something else."""


def recount(client: SyncRedis, model: str) -> bool:
    """Put a model's counts right. False, and a line in the log, where the queue never stood still for the count or
    Redis was away: the next leader's start tries again."""
    try:
        for pause in PAUSES_S:
            if correct(client, model, count(client, model)):
                return True
            time.sleep(pause)
        reason = f"the queue changed during each of {len(PAUSES_S)} counts"
    except RedisUnavailable as error:
        reason = str(error)
    log.warning("counts of the queue not compared", model=model, reason=reason, action="count_queue")
    return False


def count(client: SyncRedis, model: str) -> QueueCounts:
    """Count what waits, in calls of bounded size. Raises RedisUnavailable."""
    keys = ModelKeys(model)
    counts = QueueCounts(run(client, read("HMGET", keys.load, *_CHANGES, parse=_numbers)))
    for name in CLASSES:
        waiting = _members(client, keys.waiting(name))
        turns = _members(client, keys.turns(name))
        served = _members(client, keys.served(name))
        flows = [(name, tenant) for tenant in sorted(waiting.keys() | turns.keys() | served.keys())]
        for start in range(0, len(flows), AT_ONCE):
            counts.queues |= _count_queues(client, keys, flows[start : start + AT_ONCE])
        for flow in flows:
            queue = counts.queues[flow]
            tenant = flow[1]
            waits = queue.sequences > 0
            right = waiting.get(tenant, 0) == queue.sequences and (tenant in turns) == waits
            if not right or (tenant in served) != (queue.length > 0):
                counts.wrong.append(flow)
    return counts


def correct(client: SyncRedis, model: str, counts: QueueCounts) -> bool:
    """Write what was counted; False where the queue has changed meanwhile. Raises RedisUnavailable."""
    keys = ModelKeys(model)
    queues = counts.queues
    totals = [sum(queue.requests for queue in queues.values()), sum(queue.tokens for queue in queues.values())]
    for kind in ("requests", "sequences"):
        totals += [sum(getattr(queue, kind) for flow, queue in queues.items() if flow[0] == name) for name in CLASSES]
    for start in range(0, max(1, len(counts.wrong)), HAND_OUT):
        batch = counts.wrong[start : start + HAND_OUT]
        pairs = [word for flow in batch for word in (" ".join(flow), queues[flow].sequences)]
        former = run(client, Call("recount", (keys.load,), (keys.base, *counts.changes, *totals, *pairs), _numbers))
        if not former[0]:
            return False
        if former[1:] != totals[:2] or batch:
            log.warning(
                "counts of the queue corrected",
                model=model,
                queued=f"{former[1]}, is {totals[0]}",
                queued_tokens=f"{former[2]}, is {totals[1]}",
                tenants=len(batch),
                action="count_queue",
            )
    return True


def _members(client: SyncRedis, key: str) -> dict[str, int]:
    """The members of a sorted set with their scores, read in pages."""
    scores = dict[str, int]()
    cursor = 0
    while True:
        cursor, page = run(client, read("ZSCAN", key, cursor, "COUNT", PAGE, parse=tuple[int, list[tuple[str, float]]]))
        scores |= {member: int(score) for member, score in page}
        if not int(cursor):
            return scores


def _count_queues(client: SyncRedis, keys: ModelKeys, flows: Sequence[Flow]) -> dict[Flow, _Queue]:
    queues = {flow: _Queue() for flow in flows}
    after = dict.fromkeys(flows, "")
    while after:
        calls = [Call("waiting_page", (keys.queue(*flow),), (last, PAGE), list[Any]) for flow, last in after.items()]
        pages = dict(zip(after, run_every(client, calls), strict=True))
        for flow, (last, requests, tokens, sequences, length) in pages.items():
            queue = queues[flow]
            queue.requests += requests
            queue.tokens += tokens
            queue.sequences += sequences
            queue.length = length
            after[flow] = last
        after = {flow: after[flow] for flow, page in pages.items() if page[1] == PAGE}
    return queues


def _numbers(reply: list[Any]) -> list[int]:
    return [int(value or 0) for value in reply]
