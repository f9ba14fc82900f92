"""The admission of requests in turns: an event loop does one thing at a time, and tenants share it.

A request waits for its tenant's turn before any work is done for it. The turn lasts until the request first waits for
something, such as Redis. What it takes of the event loop's time until it is admitted is charged to its tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from api.asgi.client import Client, client_of
from api.asgi.departures import Departures, stays
from api.asgi.refusal import refusal
from api.asgi.turns import Turns, current_tenant


class Admission:
    """The turns of an API process at its event loop."""

    def __init__(self, longest_s: float, refused: Callable[[int], None]) -> None:
        """A tenant with `longest_s` seconds of work waiting gets 429; `refused` is called with the status."""
        self.turns = Turns()
        self._departures = Departures()
        self._longest_s, self._refused = longest_s, refused

    def in_turn(self, app: ASGIApp, tenant_of: Callable[[HTTPScope], str]) -> ASGIApp:
        """`app`, whose requests wait for the turns of their tenants."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            tenant, client = tenant_of(scope), client_of(scope)
            loop = asyncio.get_running_loop()
            began = loop.time()
            hesitation = self._departures.hesitation(tenant)
            if hesitation and not await stays(client, hesitation):
                self._departures.count(tenant, loop.time() - began, left=True)
                client.begin()
                return
            if self.turns.work_waiting(tenant) > self._longest_s:
                client.begin()
                await self._refuse(tenant, scope, send)
                return
            try:
                await self._admit(lambda: app(scope, receive, send), tenant, client)
            finally:
                self._departures.count(tenant, loop.time() - began, left=client.left)

        return serve

    async def _admit(self, work: Callable[[], Awaitable[None]], tenant: str, client: Client) -> None:
        """Run the work in the tenant's turn; nothing where the client leaves before it."""
        try:
            turn = await self.turns.begin(tenant, client.watched)
        except asyncio.CancelledError:
            if client.left:
                return
            raise
        client.begin()
        if client.gone():
            turn.end(None)
            return
        current_tenant.set(tenant)
        client.turn = turn
        await _Metered(work(), client)

    async def _refuse(self, tenant: str, scope: HTTPScope, send: Send) -> None:
        self._refused(429)
        wait = self.turns.expected_wait(tenant)
        message = (
            f"Requests of this tenant that need {wait:.1f} s of this API process' time wait already. Retry after that, "
            "send fewer at a time, or use another API process."
        )
        headers, content = refusal(scope["path"], scope["headers"], 429, message, "too_many_waiting", wait)
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 429, "headers": encoded})
        await send({"type": "http.response.body", "body": content, "more_body": False})


class _Metered(Awaitable[None]):
    """Runs a coroutine, and charges the time of its steps to the client's turn until the request is admitted.

    The turn ends with the first step in which it is held.
    """

    def __init__(self, work: Awaitable[None], client: Client) -> None:
        assert isinstance(work, Coroutine)
        self._work: Coroutine[Any, Any, None] = work
        self._client = client

    def __await__(self) -> Generator[Any, Any, None]:
        work, client = self._work, self._client
        error: BaseException | None = None
        while True:
            turn = client.turn
            if turn is None and error is None:
                yield from work.__await__()
                return
            began = time.thread_time()
            try:
                waited = work.send(None) if error is None else work.throw(error)
            except StopIteration:
                return
            finally:
                if turn is not None:
                    turn.spend(time.thread_time() - began)
            error = None
            try:
                yield waited
            except BaseException as thrown:  # a cancellation, which is the work's own matter
                error = thrown
