"""An API process follows a request: its state, what it lacks of the log, and its place in the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from control.constants import PLACES
from control.errors import RequestNotFound
from control.keys import ModelKeys
from control.messages import LogEntry
from control.redis.connection import Call
from control.requests.token_log import FOLLOW_ENTRIES, decode_entries


@dataclass(frozen=True, slots=True)
class Followed:
    """`fields` is the request's hash without its params; `entries` what follows in the log, `more` where it goes on.

    `params` is their JSON, "" where they were not asked for or the request has ended; `server_ms` the server's clock.
    """

    fields: dict[str, str]
    entries: list[LogEntry]
    more: bool
    params: str
    server_ms: int

    @property
    def ended(self) -> bool:
        return self.fields["state"] not in ("queued", "running")

    @property
    def expected_wait_s(self) -> float | None:
        """Seconds for which it still waits, by what was expected when it came; None where nothing could be told then,
        and once that time is over."""
        if self.fields["state"] != "queued" or "expected" not in self.fields:
            return None
        rest = int(self.fields["expected"]) - (self.server_ms - int(self.fields["t_enqueued"]))
        return rest / 1000 if rest > 0 else None


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """The place of a waiting request, from 1 in order of arrival, and the seconds for which it is still expected to
    wait; None where they are not known, and once they are over."""

    position: int
    expected_wait_s: float | None


def not_found(rid: str) -> RequestNotFound:
    """The same words whether it never was, is over, or is another tenant's: a stranger learns nothing."""
    return RequestNotFound(
        f"No request {rid!r}. It may have ended more than its retention ago.", code="request_not_found"
    )


def follow(
    model: str, rid: str, api: str, tenant: str, have: int, params: bool = False, most: int = FOLLOW_ENTRIES
) -> Call[Followed]:
    """From now on `api` gets this request's events; `have` is the last seq that it has, `most` bounds the entries.

    An `api` of "" only looks. `params`: tell them too, for a follower that could not enqueue the request again. Raises
    RequestNotFound if it is gone or another tenant's.
    """
    keys = ModelKeys(model)

    def parse(reply: list[Any]) -> Followed:
        if reply[0] == "ABSENT":
            raise not_found(rid)
        fields = dict(zip(reply[1][::2], reply[1][1::2], strict=True))
        entries = decode_entries(f"[{','.join(reply[2])}]")
        return Followed(fields, entries, len(entries) == most, reply[3], int(reply[4]))

    named = (keys.request(rid), keys.log(rid), keys.orphans)
    return Call("follow", named, (rid, api, tenant, have, int(params), most, keys.base), parse)


def unfollow(model: str, rid: str, api: str, delivered_ms: int | None = None, grace_ms: int = 0) -> Call[None]:
    """`api` stops following; when it was the last one and the request goes on, its on_disconnect applies.

    `grace_ms`: wait at least so long for somebody to follow again, whatever on_disconnect says.
    """
    keys = ModelKeys(model)
    delivered = "" if delivered_ms is None else delivered_ms

    def parse(_: Any) -> None:
        return None

    return Call("unfollow", (keys.request(rid),), (keys.base, rid, api, delivered, grace_ms), parse)


def position(model: str, rid: str) -> Call[int | None]:
    """A waiting request's place, counted from 1 in order of arrival; None once it is claimed or gone."""
    keys = ModelKeys(model)

    def parse(reply: int | None) -> int | None:
        return reply

    return Call("position", (keys.request(rid), keys.load), (), parse)


def places(model: str, api: str, rids: Sequence[str]) -> Call[list[QueuePlace | None]]:
    """The places of at most PLACES requests; None for one that does not only wait in the queue, followed by `api`.

    Such a one has been claimed, has a log, has ended or is gone, or `api` is not its follower (any more).
    """
    if not 0 < len(rids) <= PLACES:
        raise ValueError(f"places of 1 to {PLACES} requests can be read in one call, not of {len(rids)}")
    keys = ModelKeys(model)

    def parse(reply: str) -> list[QueuePlace | None]:
        numbers: list[int] = msgspec.json.decode(reply)
        return [
            QueuePlace(position, rest_ms / 1000 or None) if position else None
            for position, rest_ms in zip(numbers[::2], numbers[1::2], strict=True)
        ]

    return Call("places", (keys.load,), (keys.base, api, *rids), parse)
