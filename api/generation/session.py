"""One client: who sends a request, and the session that brings it the answer, from the feeds through the renderer.

A client gets one body, or server-sent events: ready tokens joined, comments meanwhile, an error event at a late
failure.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import structlog
from litestar import Response
from litestar.types import Receive, Scope, Send

from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.generation.archive import Archive
from api.generation.chunks import StreamRenderer
from api.generation.event_rendering import EventRenderer
from api.generation.follow import Feeds, Follower
from api.generation.native_rendering import NativeRenderer
from api.generation.ollama_rendering import OllamaRenderer
from api.generation.seals import Seal, Seals
from api.generation.vectors import VECTORS, VectorRenderer
from api.http.connection import Client
from api.http.errors import (
    CLIENT_LEFT,
    CLIENT_LEFT_TEXT,
    ClientDisconnected,
    ShuttingDown,
    StreamInterrupted,
    problem,
)
from api.http.gate import ANONYMOUS, Identity
from api.http.limits import Settler
from api.http.turns import off_loop
from api.http.uvicorn_hooks import BodyWriter
from api.images.loading import RequestImages
from api.models.models import ServedModel
from api.observability import RequestLog, WaitLog
from api.schemas.decoding import Warnings
from api.schemas.view import Cursor, View, decode_view
from api.settings import ApiSettings
from control.clock import now_ms
from control.errors import ModelUnavailable
from control.messages import LogEntry, encode
from control.requests.upkeep.stranded import GRACE_MS

log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True)
class Shutdown:
    """The stage of the process's end."""

    draining: bool = False
    """Set at SIGTERM: nothing new is taken, what runs goes on."""
    interrupted: bool = False
    """Set when the grace is over: what still runs is told to go on elsewhere."""

    def refuse_when_draining(self) -> None:
        """Raises ShuttingDown once no new stream may begin."""
        if self.draining:
            raise ShuttingDown("This API process is shutting down. Send the request to another one, or retry shortly.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of one HTTP request: its identity and what its headers say."""

    request_log: RequestLog
    tenant: str = ""
    identity: Identity = ANONYMOUS
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Headers of the response, filled while the request is handled."""
    warnings: Warnings = field(default_factory=Warnings)
    """Parts of the request that were accepted without an effect, filled while it is read."""
    images: RequestImages = field(default_factory=RequestImages)
    """Its images that are loaded; empty once they belong to the request."""
    idempotency_key: str = ""
    body_hash: str = ""
    body_bytes: int = 0
    on_disconnect: str | None = None
    client_request_id: str | None = None
    rid: str = ""
    """Fresh for every HTTP request; never what the client sent as X-Request-ID."""
    client: Client = field(default_factory=Client)
    """Its connection: whether it is still there."""

    def identified(self, tenant: str, body: bytes = b"", idempotency_key: str = "") -> Caller:
        """The same caller with its tenant, its body's size and its Idempotency-Key."""
        self.request_log.tenant = tenant
        body_hash = hashlib.sha256(body).hexdigest() if idempotency_key else ""
        return replace(self, tenant=tenant, body_hash=body_hash, body_bytes=len(body), idempotency_key=idempotency_key)

    def check_present(self, on_disconnect: str | int | float | None) -> None:
        """Raises ClientDisconnected for a client that has left, unless its request is to go on then.

        `on_disconnect` is the body's field, which goes before the header.
        """
        policy = self.on_disconnect if on_disconnect is None else on_disconnect
        if policy in (None, "cancel") and self.client.gone():
            raise ClientDisconnected


ENTRY_BYTES = 20
"""Of an entry of the log in JSON without log probabilities, about."""
# Entries of the log that one turn of the event loop renders: some milliseconds. With twenty log probabilities an entry
# costs thirty times as much, and one of a prompt has many tokens.
TURN_ENTRIES = 1024
TURN_SCORED = 64
TURN_PROMPTS = 1


def log_bytes(entries: int, renderer: StreamRenderer) -> int:
    """About the size of the token log of an answer in JSON."""
    return ENTRY_BYTES * entries + renderer.body_bytes


def _turn_of(view: View) -> int:
    if view.prompt_logprobs is not None or (view.echo and view.logprobs is not None):
        return TURN_PROMPTS
    return TURN_ENTRIES if view.logprobs is None else TURN_SCORED


@dataclass(eq=False, kw_only=True)
class Session:
    """One client that follows one answer. `release` must be called once the client has all of it, or has left."""

    feeds: Feeds
    renderer: StreamRenderer
    caller: Caller
    settings: ApiSettings
    shutdown: Shutdown
    load_stage: Callable[[], str | None]
    """The stage of the model's load; None if it serves."""
    complete: Callable[[bytes, bytes], Awaitable[object]]
    """Completes the stored response; takes its body, and the token log of a chat."""
    settle_limits: Callable[[], None] | None = None
    """Has the API key's limits settled soon after the end; None where it has none."""
    _released: bool = field(default=False, init=False)

    @property
    def rid(self) -> str:
        return self.feeds.rid

    def take(self) -> Iterator[tuple[int, list[LogEntry]]]:
        """Entries of each member for one turn of the event loop."""
        return self.feeds.take(_turn_of(self.renderer.view))

    async def settle(self) -> None:
        """Wait for the claim, the first token or an early refusal, so that the status line can be honest.

        Raises ClientDisconnected.
        """
        feeds = self.feeds
        request_log = self.caller.request_log
        until = self.settings.early_refusal
        with self.caller.client.watched(self.client_left):
            while not feeds.started and request_log.waited < until and not self.shutdown.interrupted:
                self.check_present()
                feeds.wake.clear()
                await feeds.wait(until - request_log.waited)
        self.check_present()
        feeds.wake.set()

    def early_failure(self) -> Exception | None:
        """The error of a request that ended before its first token, while the status line is still open."""
        for member, feed in enumerate(self.feeds.members):
            if feed.error is not None and feed.have == 0:
                return feed.error
            if feed.ended_without_token:
                self.renderer.feed(member, feed.take())
        return self.renderer.failure

    async def collect(self) -> list[Piece]:
        """All choices' text, once all have ended. Raises the feeds' errors and ClientDisconnected."""
        feeds = self.feeds
        renderer = self.renderer
        request_log = self.caller.request_log
        pieces = renderer.empty_pieces()
        while not renderer.finished:
            feeds.wake.clear()
            self.check_interrupted()
            progress = False
            for member, entries in self.take():
                renderer.collect(pieces, member, entries)
                progress = True
            if progress:
                request_log.first_token()
                await feeds.rest()
                continue
            feeds.check()
            self.check_present()
            self.check_loading()
            await (feeds.wait(STAGE_EVERY_S) if self.settings.max_load_wait else feeds.wake.wait())
        return pieces

    async def store(self) -> None:
        """Complete the stored response, if there is one, before the client gets the end."""
        if not self.renderer.view.extra_fields:
            return
        if (body := await off_loop(self.renderer.body_bytes, lambda: self.renderer.to_store)) is not None:
            await self.complete(body, await self._log())

    async def _log(self) -> bytes:
        """The token log of a chat (JSON), by which it can be replayed."""
        if self.renderer.view.endpoint != "chat":
            return b""
        [feed] = self.feeds.members
        return await off_loop(log_bytes(feed.have, self.renderer), lambda: encode(feed.entries[:]))

    def client_left(self) -> None:
        """Called when the client leaves: its request is withdrawn at once, and its reader woken."""
        self.left()
        self.feeds.wake.set()

    def left(self) -> None:
        """The connection is gone before the end: the client closed it, or read nothing, or this process stops."""
        if self.caller.client.stalled:
            text = "cut: the client read nothing"
        else:
            text = "cut by shutdown" if self.shutdown.interrupted else CLIENT_LEFT_TEXT
        self.release(status=CLIENT_LEFT, error=text)

    def check_present(self) -> None:
        """Raises ClientDisconnected once the client has left."""
        if self.caller.client.left:
            raise ClientDisconnected

    def check_loading(self) -> None:
        """Raises ModelUnavailable where the client has waited for the load of the model for --max-load-wait."""
        limit = self.settings.max_load_wait
        request_log = self.caller.request_log
        late = limit > 0 and request_log.before_first_token and request_log.waited > limit
        if late and (stage := self.load_stage()) is not None:
            why = f"{stage} after {limit:g} s, the limit of --max-load-wait; retry later"
            raise ModelUnavailable(self.feeds.model, "loading", why)

    def check_interrupted(self) -> None:
        """Raises StreamInterrupted, telling where to go on, once this process is about to end."""
        if self.shutdown.interrupted:
            raise StreamInterrupted(self.rid, self.renderer.place)

    def release(self, *, status: int, error: str | None = None, delivered: bool = False) -> None:
        """Stop following and write the terminal line; later calls do nothing."""
        if self._released:
            return
        self._released = True
        # Where this process cut the client off, the client has not left: it gets time to resume, here or elsewhere.
        grace_ms = GRACE_MS if not delivered and (self.shutdown.interrupted or self.caller.client.stalled) else 0
        self.feeds.leave(now_ms() if delivered else None, grace_ms)
        if self.settle_limits is not None:
            self.settle_limits()
        request_log = self.caller.request_log
        reasons = {reason or "disconnected" for answer in self.renderer.answers for reason in answer.finish_reasons}
        request_log.end(
            status=status,
            finish_reason=",".join(sorted(reasons)),
            usage=None if request_log.before_first_token else self.renderer.usage,
            error=error,
        )


def renderer_of(
    rid: str,
    view: View,
    vocabulary: Vocabulary,
    prompt_tokens: int,
    resume: Cursor | None = None,
    seal: Seal | None = None,
) -> StreamRenderer:
    """The renderer of the endpoint that the request came to; `seal` is needed where `view.sealed`."""
    if view.endpoint in ("responses", "messages"):
        return EventRenderer(rid, view, vocabulary, prompt_tokens, resume, seal)
    if view.endpoint in ("ollama_chat", "ollama_generate"):
        return OllamaRenderer(rid, view, vocabulary, prompt_tokens)
    if view.endpoint in VECTORS:
        return VectorRenderer(rid, view, vocabulary, prompt_tokens)
    if view.endpoint in ("infill", "completion"):
        return NativeRenderer(rid, view, vocabulary, prompt_tokens, resume)
    return StreamRenderer(rid, view, vocabulary, prompt_tokens, resume)


class Sessions:
    """Opens the sessions of new requests, and of those that another client or process began."""

    def __init__(
        self,
        follower: Follower,
        archive: Archive,
        seals: Seals,
        settler: Settler,
        waits: WaitLog,
        settings: ApiSettings,
        shutdown: Shutdown,
        load_stage: Callable[[str], str | None],
    ) -> None:
        self._follower = follower
        self._archive = archive
        self._seals = seals
        self._settler = settler
        self._waits = waits
        self._settings = settings
        self._shutdown = shutdown
        self._load_stage = load_stage

    async def feeds(self, model: str, tenant: str, rid: str) -> Feeds:
        """Feeds for the answer `rid`, without a member yet; subscribes to the model's events."""
        await self._follower.subscribe(model)
        return Feeds(self._follower, model, tenant, rid)

    def open(self, feeds: Feeds, renderer: StreamRenderer, caller: Caller) -> Session:
        identity = caller.identity
        self._waits.add(caller.request_log, feeds)
        return Session(
            feeds=feeds,
            renderer=renderer,
            caller=caller,
            settings=self._settings,
            shutdown=self._shutdown,
            load_stage=partial(self._load_stage, feeds.model),
            complete=partial(self._archive.complete, feeds.rid, identity.owner),
            settle_limits=partial(self._settler.nudge, feeds.model) if identity.limited else None,
        )

    async def join(self, feeds: Feeds, served: ServedModel, caller: Caller, cursor: Cursor | None = None) -> Session:
        """The session of a request that runs already, shown by its own view."""
        caller.request_log.know(rid=feeds.rid)
        await feeds.meet()
        log.info(
            "took up a request that another client or process began",
            action="take_up",
            rid=feeds.rid,
            model=served.name,
        )
        view = decode_view(feeds.members[0].fields["view"])
        prompt_tokens = sum(int(feed.fields["prompt_tokens"]) for feed in feeds.members)
        caller.request_log.know(prompt_tokens=prompt_tokens)
        seal = await self._seals.sealer(feeds.tenant) if view.sealed else None
        renderer = renderer_of(feeds.rid, view, served.vocabulary, prompt_tokens, cursor, seal)
        return self.open(feeds, renderer, caller)


STREAM_HEADERS = {
    # As a header: the framework would let the handler's annotation decide the media type.
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Of every streamed answer; the last one keeps nginx from buffering."""
PLACE_EVERY_S = 5.0
"""Least time between two comments about a client's place in the queue."""
STAGE_EVERY_S = 1.0
"""Time between two looks at the load of the model that a client waits for."""


class EventStream(Response[None]):
    """The response of a stream; the client's leaving releases the request.

    It is an ASGI application itself: the framework's stream watches each client with a task of its own, which costs as
    much as the admission of a request.
    """

    def __init__(self, session: Session) -> None:
        headers = {"content-type": session.renderer.media_type, "x-request-id": session.rid}
        super().__init__(None, status_code=200, headers=STREAM_HEADERS | headers)
        self._session = session

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        return self._send

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items()]
        stream = events(self._session)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for data in stream:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await stream.aclose()
            self._session.left()  # where the client left before the first event


async def events(session: Session) -> AsyncGenerator[bytes]:
    """All bytes of a stream, but those that a `_DirectWriter` sends meanwhile. Begun after the answer's head was sent.

    No exception leaves the generator: it would cut the connection without an error event.
    """
    renderer = session.renderer
    failure: BaseException | None = None
    try:
        with session.caller.client.watched(session.client_left):
            async for data in _tokens(session):
                yield data
        failure = renderer.failure
    except ClientDisconnected:
        session.left()
        return
    except StreamInterrupted as error:
        yield renderer.interruption(error)
        session.release(status=problem(error).status, error="cut by shutdown")
        return
    except Exception as error:
        failure = error
    except (asyncio.CancelledError, GeneratorExit):
        session.left()
        raise
    closing = renderer.end(failure)
    await session.store()
    yield closing
    if failure is None:
        session.release(status=200, delivered=True)
    else:
        session.release(status=problem(failure).status, error=str(failure), delivered=True)


class _DirectWriter:
    """Writes the tokens of a stream as they come, while its task waits: to wake the task costs as much as all the rest.

    Where the client reads too slowly, the answer has ended or something has failed, the task is woken to see to it.
    """

    def __init__(self, session: Session, body: BodyWriter) -> None:
        self._session = session
        self._body = body
        self.written_at = 0.0
        """Time of the last part, in seconds since the request came."""
        self.failure: Exception | None = None

    def write(self) -> None:
        session = self._session
        renderer = session.renderer
        try:
            if self._body.ready:
                data = b""
                ends = False
                for member, entries in session.take():
                    data += renderer.feed(member, entries)
                    ends = ends or entries[-1].finish is not None
                if data:
                    self._body.write(data)
                    self.written_at = session.caller.request_log.waited
                if not (ends and renderer.finished):
                    return
        except Exception as error:
            self.failure = error
        session.feeds.wake.set()


async def _tokens(session: Session) -> AsyncGenerator[bytes]:
    """As `events`, until every choice has ended. Raises what ended the request from outside."""
    feeds = session.feeds
    renderer = session.renderer
    request_log = session.caller.request_log
    settings = session.settings
    body = session.caller.client.body_writer()
    direct = None if body is None else _DirectWriter(session, body)
    sent_at = request_log.waited
    shown_stage: str | None = None
    if request_log.before_first_token:
        feeds.watch_place()
    if prelude := renderer.prelude():
        yield prelude
    while not renderer.finished or (direct is not None and direct.failure is not None):
        feeds.wake.clear()
        session.check_present()
        session.check_interrupted()
        if direct is not None:
            sent_at = max(sent_at, direct.written_at)
            if direct.failure is not None:
                raise direct.failure
        if feeds.ready:
            data = b""
            for member, entries in session.take():
                data += renderer.feed(member, entries)
            if data:
                request_log.first_token()
                yield data
                sent_at = request_log.waited
            if renderer.finished:
                return
            if feeds.wake.is_set():
                await feeds.rest()
                continue
        feeds.check()
        if request_log.before_first_token and feeds.place_changed:
            comment = renderer.queue_place(feeds.show_place(PLACE_EVERY_S), feeds.expected_wait_ms)
            if comment:
                yield comment
                sent_at = request_log.waited
        stage = session.load_stage() if request_log.before_first_token else None
        if stage is not None:
            session.check_loading()
            if stage != shown_stage and (comment := renderer.load_stage(stage)):
                yield comment
                shown_stage = stage
                sent_at = request_log.waited
        pause = settings.keep_alive - (request_log.waited - sent_at)
        if pause <= 0.01:
            yield renderer.keep_alive()
            sent_at = request_log.waited
            pause = settings.keep_alive
        write = None if direct is None or request_log.before_first_token else direct.write
        await feeds.wait(pause if stage is None else min(pause, STAGE_EVERY_S), write)
