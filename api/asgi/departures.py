"""Tenants whose clients leave at once: a request of theirs waits a moment before any work is done for it.

A connection that is cut a few milliseconds after its request was sent costs the admission, and where a worker claims
the request before the cancellation arrives, a prefill. Tenants whose clients stay do not wait.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from api.asgi.client import Client

AT_ONCE_S = 0.1
"""A client that leaves before this age of its request left at once; a busy event loop learns of it late."""
LONGEST_S = 0.05
"""Age at which a request of such a tenant is begun at the latest."""
_RECENT = 1 / 16
"""Weight of the newest request in a tenant's means."""
_FREQUENT = 0.5
_FORGOTTEN = 0.01
_TENANTS = 4096


@dataclass(slots=True)
class _Tenant:
    share: float = 0.0
    """Of recent requests, those whose clients left at once."""
    age_s: float = 0.0
    """Mean age of their requests when they had left."""


class Departures:
    """The share of each tenant's recent requests whose clients left at once, and their age then."""

    def __init__(self) -> None:
        self._tenants = OrderedDict[str, _Tenant]()
        """Those with such requests; the one that was counted last is at the end."""

    def hesitation(self, tenant: str) -> float:
        """Seconds for which a request waits: twice the age at which most of the tenant's clients leave, or 0."""
        state = self._tenants.get(tenant)
        return min(LONGEST_S, 2 * state.age_s) if state is not None and state.share > _FREQUENT else 0.0

    def count(self, tenant: str, age_s: float, *, left: bool) -> None:
        """Count a request whose client left at this age, or whose answer ended."""
        left = left and age_s < AT_ONCE_S
        state = self._tenants.pop(tenant, None)
        if state is None:
            state = _Tenant(age_s=age_s)
        state.share += _RECENT * (left - state.share)
        if left:
            state.age_s += _RECENT * (age_s - state.age_s)
        if state.share > _FORGOTTEN:
            self._tenants[tenant] = state
            if len(self._tenants) > _TENANTS:
                self._tenants.popitem(last=False)


async def stays(client: Client, seconds: float) -> bool:
    """Wait so long; False as soon as the client has left."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    timer = loop.call_later(seconds, end)
    try:
        with client.watched(end):
            await over
    finally:
        timer.cancel()
    return not client.gone()
