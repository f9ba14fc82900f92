"""The middleware that a request passes before its route: HEAD, its path, and the turn of its tenant.

HEAD is answered as HTTP means it: GET without the body, for the probes and clients that ask so. Each route is there
with and without `/v1`: clients differ in whether their base URL ends with it.

An event loop does one thing at a time, and tenants share it. A request waits for its tenant's turn before any work is
done for it. The turn lasts until the request first waits for something, such as Redis. What it takes of the event
loop's time until it is admitted is charged to its tenant.

Requests of tenants whose clients leave at once wait a moment before that. A connection that is cut a few milliseconds
after its request was sent costs the admission, and where a worker claims the request before the cancellation arrives, a
prefill. Tenants whose clients stay do not wait.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from api.http.connection import Client, client_of
from api.http.errors import refusal
from api.http.turns import Turns, current_tenant


def answering_head(app: ASGIApp) -> ASGIApp:
    """`app`, which knows GET alone; the server leaves the body out. A stream is not begun for a HEAD."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and not scope["path"].endswith("/events"):
            # A copy: by its own the server knows that no body must go out.
            scope = scope.copy()
            scope["method"] = "GET"
        await app(scope, receive, send)

    return answer


_PREFIXES = re.compile(r"^(?:/openai(?=/v1/))?(?:/v1)+(?=/)")
_WITH = frozenset(
    ("chat", "completions", "embeddings", "messages", "models", "requests", "rerank", "responses", "usage")
)
"""First parts of the paths under `/v1`."""
_WITHOUT = frozenset(
    (
        "api",
        "apply-template",
        "completion",
        "detokenize",
        "embed",
        "embedding",
        "health",
        "infill",
        "load",
        "metrics",
        "ping",
        "props",
        "ready",
        "score",
        "slots",
        "tokenize",
        "tokenizer_info",
        "version",
    )
)
"""First parts of the paths beside `/v1`."""
_OTHER_NAMES = {"/v2/embed": "/v2/embed", "/v2/rerank": "/v1/rerank", "/reranking": "/v1/rerank"}
"""The paths of newer Cohere clients and llama.cpp's, with the route of each."""


def canonical(path: str) -> str:
    """The path of the route that is meant; other paths as they are. A prefix that comes twice counts once, and
    `/openai/v1` is `/v1`, as at servers that have several APIs."""
    rest = _PREFIXES.sub("", path)
    if (route := _OTHER_NAMES.get(rest)) is not None:
        return route
    first = rest[1:].partition("/")[0]
    if first in _WITH:
        return f"/v1{rest}"
    return rest if first in _WITHOUT else path


def with_any_prefix(app: ASGIApp) -> ASGIApp:
    """`app`, which has each route once."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := canonical(scope["path"])) != scope["path"]:
            scope["path"] = path
        await app(scope, receive, send)

    return route


AT_ONCE_S = 0.1
"""A client that leaves before this age of its request left at once; a busy event loop learns of it late."""
HESITATION_S = 0.05
"""Age at which a request is begun of a tenant whose clients mostly leave at once, so that they cost no work. It is
fixed: a connection waits before it is accepted, so that its client stayed longer than its request tells."""
_RECENT = 1 / 16
"""Weight of the newest request in a tenant's mean."""
_FREQUENT = 0.5
_FORGOTTEN = 0.01
_TENANTS = 4096


class Departures:
    """The share of each tenant's recent requests whose clients left at once."""

    def __init__(self) -> None:
        self._shares = OrderedDict[str, float]()
        """Of tenants with such requests; the one that was counted last is at the end."""

    def hesitation(self, tenant: str) -> float:
        """Seconds for which a request waits before it is begun."""
        return HESITATION_S if self._shares.get(tenant, 0.0) > _FREQUENT else 0.0

    def count(self, tenant: str, age_s: float, *, disconnected: bool) -> None:
        """Count a request whose client left at this age, or whose answer ended."""
        share = self._shares.pop(tenant, 0.0)
        share += _RECENT * ((disconnected and age_s < AT_ONCE_S) - share)
        if share > _FORGOTTEN:
            self._shares[tenant] = share
            if len(self._shares) > _TENANTS:
                self._shares.popitem(last=False)


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
    return not client.has_left()


class Admission:
    """The turns of an API process at its event loop."""

    def __init__(self, longest_s: float, refused: Callable[[int], None]) -> None:
        """A tenant with `longest_s` seconds of work waiting gets 429; `refused` is called with the status."""
        self.turns = Turns()
        self._departures = Departures()
        self._longest_s = longest_s
        self._refused = refused

    def in_turn(self, app: ASGIApp, tenant_of: Callable[[HTTPScope], str]) -> ASGIApp:
        """`app`, whose requests wait for the turns of their tenants."""

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            tenant = tenant_of(scope)
            client = client_of(scope)
            loop = asyncio.get_running_loop()
            began = loop.time()
            hesitation = self._departures.hesitation(tenant)
            if hesitation and not await stays(client, hesitation):
                self._departures.count(tenant, loop.time() - began, disconnected=True)
                client.begin()
                return
            if self.turns.work_waiting(tenant) > self._longest_s:
                client.begin()
                await self._refuse(tenant, scope, send)
                return
            try:
                await self._admit(lambda: app(scope, receive, send), tenant, client)
            finally:
                self._departures.count(tenant, loop.time() - began, disconnected=client.disconnected)

        return serve

    async def _admit(self, work: Callable[[], Awaitable[None]], tenant: str, client: Client) -> None:
        """Run the work in the tenant's turn; nothing where the client leaves before it."""
        try:
            turn = await self.turns.begin(tenant, client.watched)
        except asyncio.CancelledError:
            if client.disconnected:
                return
            raise
        client.begin()
        if client.has_left():
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

    An active turn ends with the first step that is charged to it.
    """

    def __init__(self, work: Awaitable[None], client: Client) -> None:
        assert isinstance(work, Coroutine)
        self._work: Coroutine[Any, Any, None] = work
        self._client = client

    def __await__(self) -> Generator[Any, Any, None]:
        work = self._work
        client = self._client
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
