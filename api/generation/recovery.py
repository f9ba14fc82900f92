"""Bringing back what Redis has lost of a request, from what this process knows: parameters and what was delivered."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from api.generation.feed import Feed
from control.clock import now_ms
from control.errors import LogConflict, RequestNotFound
from control.messages import decode_request
from control.redis.clients import AsyncRedis
from control.redis.connection import Steps, arun_steps
from control.requests import Enqueue, Enqueued, Followed, enqueue_again, repair

log = structlog.stdlib.get_logger(__name__)


def bring_back(feed: Feed, now_ms: int) -> Steps[Enqueued] | None:
    """Enqueue the request again under its id, seed and delivered prefix; None if its parameters are unknown."""
    origin = feed.origin
    if origin is None:
        return None
    deadline_ms = origin.deadline_ms
    if deadline_ms:
        # At least a millisecond: a request whose time has passed ends as expired, by the same rules as any other.
        deadline_ms = max(1, deadline_ms - (now_ms - origin.received_ms))
    return enqueue_again(msgspec.structs.replace(origin, deadline_ms=deadline_ms, lost=True), feed.entries)


def origin_of(feed: Feed, followed: Followed, api: str, now_ms: int) -> Enqueue | None:
    """The request as it was enqueued first, as `api` would enqueue it; None for one that has ended, and for one with
    images, whose pixels only the process has that enqueued it.

    Its deadline counts as `bring_back` reads it: from the moment of receipt on the other process's clock, and by this
    one's clock. The time left is known by the server's clock, so clocks that differ do no harm.
    """
    if not followed.params:
        return None
    params = decode_request(followed.params)
    if params.images:
        return None
    fields = followed.fields
    received_ms = int(fields["t_received"])
    left_ms = int(fields["deadline"]) - followed.server_ms
    return Enqueue(
        rid=feed.rid,
        model=feed.model,
        params=params,
        tenant=feed.tenant,
        account=fields.get("account", ""),
        hold=fields.get("hold", ""),
        priority=fields["priority"],
        deadline_ms=(left_ms + now_ms - received_ms) or 1,  # 0 would mean none
        on_disconnect=fields["on_disconnect"],
        api=api,
        idempotency_key=fields["idempotency"],
        body_hash=fields["body_hash"],
        view=fields["view"],
        received_ms=received_ms,
        keep_ms=int(fields.get("keep", "0")),
    )


def set_back(feed: Feed, followed: Followed, had: int) -> bool:
    """True if Redis has less of the request than this process `had` when it asked, or something else."""
    return feed.diverged or int(followed.fields["seq"]) < had


class Recovery:
    """Restores requests and logs that Redis has lost from what the feeds of this process hold."""

    def __init__(self, client: AsyncRedis, api: str, lost_wait: float, read_again: Callable[[Feed], None]) -> None:
        """`lost_wait`: seconds for which another process is given the time to bring back what this one can't."""
        self._client = client
        self._api = api
        self._lost_wait = lost_wait
        self._read_again = read_again

    async def gone(self, feed: Feed, error: RequestNotFound, now: float) -> None:
        """Redis does not know the request: bring it back. A request that this process never met fails with `error`."""
        feed.heard_at = now
        if not feed.begun:
            feed.fail(error)  # it never was, or is another tenant's
            return
        feed.missing_since = feed.missing_since or now
        steps = bring_back(feed, now_ms())
        if steps is not None:
            await arun_steps(self._client, steps)
            log.warning("brought a lost request back", action="bring_back", rid=feed.rid, delivered=feed.have)
            # Ends it where its end was delivered, and tells where another process had brought it back.
            await self.give_back(feed)
        elif feed.complete:
            feed.missing_since = None  # all that the reader still lacks is here
        elif now - feed.missing_since > self._lost_wait:
            feed.fail(error)

    async def give_back(self, feed: Feed) -> None:
        """Redis has lost entries that this process was given: they are written back before anything else is read."""
        try:
            repaired = await arun_steps(
                self._client, repair(feed.model, feed.rid, self._api, feed.tenant, feed.entries)
            )
        except LogConflict as error:
            feed.fail(error)
            return
        except RequestNotFound:
            return  # gone since: the next look brings it back
        feed.repaired()
        self._read_again(feed)
        if repaired != "same":
            log.warning("gave a token log back", action="repair", rid=feed.rid, seq=feed.have, outcome=repaired)
