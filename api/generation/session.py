"""A client that follows an answer: its session, opened for a new request or for one that exists already, and the bytes
that it is sent, from the feeds through the renderer.

A client gets one body, or server-sent events: ready tokens joined, comments meanwhile, an error event at a late
failure. A fresh refusal by a full queue is repeated without tokenising the prompt and asking Redis again
(`Backpressure`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import structlog
from litestar import Response
from litestar.types import Receive, Scope, Send

from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.generation.archive import Archive
from api.generation.chunks import StreamRenderer
from api.generation.client_request import Body, Caller, ClientRequest, text_request
from api.generation.event_rendering import EventRenderer
from api.generation.follow import Feeds, Follower
from api.generation.native_rendering import NativeRenderer
from api.generation.ollama_rendering import OllamaRenderer
from api.generation.pooling_request import pooling_request
from api.generation.seals import Seal, Seals
from api.generation.vector_rendering import VECTORS, VectorRenderer
from api.http.errors import (
    CLIENT_LEFT,
    CLIENT_LEFT_TEXT,
    ClientDisconnected,
    ShuttingDown,
    StreamInterrupted,
    problem,
)
from api.http.limits import Limiter
from api.http.turns import off_loop
from api.http.uvicorn_hooks import BodyWriter
from api.models.grammar import GrammarChecks
from api.models.models import ModelRegistry, ServedModel
from api.observability import WaitLog
from api.schemas.embeddings import InputsRequest
from api.schemas.view import StreamCursor, View, decode_view
from api.settings import ApiSettings
from control import requests
from control.clock import now_ms
from control.errors import (
    FurrowError,
    ModelNotFound,
    ModelUnavailable,
    QueueFull,
    RedisUnavailable,
    RequestError,
    RequestNotFound,
)
from control.messages import LogEntry, encode
from control.redis.connection import Batches
from control.requests import member_rid
from control.requests.upkeep.stranded import GRACE_MS

log = structlog.stdlib.get_logger(__name__)


@dataclass(slots=True)
class ShutdownState:
    """The stage of the process's end."""

    draining: bool = False
    """Set at SIGTERM: nothing new is taken, what runs goes on."""
    interrupted: bool = False
    """Set when the grace is over: what still runs is told to go on elsewhere."""

    def refuse_when_draining(self) -> None:
        """Raises ShuttingDown once no new stream may begin."""
        if self.draining:
            raise ShuttingDown("This API process is shutting down. Send the request to another one, or retry shortly.")


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
    shutdown: ShutdownState
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
        self.abandon()
        self.feeds.wake.set()

    def abandon(self) -> None:
        """Release the session of a connection that is gone before the end: the client closed it or read nothing, or
        this process stops."""
        if self.caller.client.stalled:
            text = "cut: the client read nothing"
        else:
            text = "cut by shutdown" if self.shutdown.interrupted else CLIENT_LEFT_TEXT
        self.release(status=CLIENT_LEFT, error=text)

    def check_present(self) -> None:
        """Raises ClientDisconnected once the client has left."""
        if self.caller.client.disconnected:
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
    resume: StreamCursor | None = None,
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
    """The response of a stream. It releases the request where the client leaves.

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
            self._session.abandon()  # where the client left before the first event


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
        session.abandon()
        return
    except StreamInterrupted as error:
        yield renderer.interruption(error)
        session.release(status=problem(error).status, error="cut by shutdown")
        return
    except Exception as error:
        failure = error
    except (asyncio.CancelledError, GeneratorExit):
        session.abandon()
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

    Where the client reads too slowly, the answer has ended or something has failed, the task is woken to handle it.
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


FRESH_S = 0.1
"""Seconds for which a refusal stands. Few places become free meanwhile, so a queue worth waiting in doesn't run dry."""
_MOST = 4096


class Backpressure:
    """The refusals of the last moments, by model, tenant and class."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[str, str, str], tuple[float, QueueFull]] = {}

    def note(self, model: str, tenant: str, priority: str, error: QueueFull) -> None:
        """Remember a refusal, unless it was for the request's own size: a smaller one may get in."""
        if error.bound == "tokens":
            return
        now = self._clock()
        if len(self._refused) >= _MOST:
            self._refused = {who: last for who, last in self._refused.items() if now - last[0] < FRESH_S}
        self._refused[model, tenant, priority] = now, error

    def check(self, model: str, tenant: str, priority: str) -> None:
        """Raises the QueueFull that still stands, if there is one."""
        at, error = self._refused.get((model, tenant, priority), (0.0, None))
        if error is not None and self._clock() - at < FRESH_S:
            raise QueueFull(error.model, error.queued, error.retry_after, error.bound)


_LOOK_AGAIN_S = 0.2
"""Between two looks for a request that Redis has lost."""


class Sessions:
    """Opens the sessions of new requests, and of those that another client or process began."""

    def __init__(
        self,
        follower: Follower,
        batches: Batches,
        models: ModelRegistry,
        archive: Archive,
        seals: Seals,
        grammars: GrammarChecks,
        limiter: Limiter,
        waits: WaitLog,
        settings: ApiSettings,
        shutdown: ShutdownState,
    ) -> None:
        self._follower = follower
        self._batches = batches
        self._models = models
        self._archive = archive
        self._seals = seals
        self._grammars = grammars
        self._limiter = limiter
        self._waits = waits
        self._settings = settings
        self._shutdown = shutdown
        self._backpressure = Backpressure()

    async def submit(self, body: Body | InputsRequest, caller: Caller) -> Session:
        """Check, tokenise and enqueue; an Idempotency-Key that is known joins the request that runs.

        Raises RequestError and its kin, RateLimited, QueueFull, ModelUnavailable, RedisUnavailable.
        """
        served = await self._models.resolve(body.model)
        caller.request_log.know(model=served.name)
        caller.identity.check_model(body.model, served.name)
        queue = served.name, caller.tenant, caller.identity.priority(body.priority)
        if not caller.idempotency_key:  # with one it may join a request that is queued already
            self._backpressure.check(*queue)
        caller.check_present(body.on_disconnect)
        request = await self._client_request(body, caller, served)
        caller.check_present(body.on_disconnect)
        caller.request_log.know(prompt_tokens=request.prompt_tokens)
        view = request.view
        seal = await self._seals.sealer(caller.tenant) if view.sealed else None
        feeds = await self._feeds(served.name, caller.tenant, caller.rid)
        members = {member_rid(caller.rid, place): member for place, member in enumerate(request.members)}
        refund = await self._limiter.begin(caller.identity.key, served.name, members, request.tell_allowance)
        try:
            await self._enqueue(request, feeds, lambda: caller.check_present(body.on_disconnect))
        except BaseException as error:
            feeds.leave()
            queued = sum(feed.begun for feed in feeds.members)
            # One whose answer is lost may have been queued: then its end settles it, else its estimate stands.
            refund(queued + isinstance(error, RedisUnavailable | asyncio.CancelledError))
            if isinstance(error, QueueFull):
                self._backpressure.note(*queue, error)
            if queued and isinstance(error, FurrowError) and feeds.rid == caller.rid:
                await self._withdraw(served.name, list(members)[: queued + 1], caller.tenant)
            raise
        if feeds.rid != caller.rid:
            refund(0)  # the request that was joined has a hold of its own
            return await self._join(feeds, served, caller)
        renderer = renderer_of(feeds.rid, view, served.vocabulary, request.prompt_tokens, seal=seal)
        return self._open(feeds, renderer, caller)

    async def _client_request(self, body: Body | InputsRequest, caller: Caller, served: ServedModel) -> ClientRequest:
        if isinstance(body, InputsRequest):
            return await pooling_request(body, caller, served)
        return await text_request(body, caller, served, self._grammars, strict=self._settings.strict)

    async def _enqueue(self, request: ClientRequest, feeds: Feeds, check_present: Callable[[], None]) -> None:
        """Enqueue every member, and have its feed begin."""
        for member in range(len(request.members)):
            enqueue = request.enqueue(feeds.rid, member, self._settings)
            # Before the enqueue: the first tokens may be published before its answer is here.
            feed = feeds.open(enqueue.rid)
            if enqueue.images:
                await self._stage_images(enqueue)
            enqueued = await self._batches.run(enqueue.model, requests.enqueue(enqueue), check_present)
            if enqueued.rid != enqueue.rid:
                feed = feeds.replace_last(enqueued.rid)
            # A request that was joined may have another seed than the one drawn here.
            ours = feed.rid == enqueue.rid and feeds.rid == request.caller.rid
            feed.begin(enqueue if ours else None)
            feed.position = enqueued.position

    async def _stage_images(self, enqueue: requests.Enqueue) -> None:
        bounds = self._archive.image_bounds
        for piece in requests.stage_images(enqueue.model, enqueue.rid, enqueue.images, enqueue.tenant, bounds):
            await self._batches.run(enqueue.model, piece)

    async def _withdraw(self, model: str, rids: list[str], tenant: str) -> None:
        """End the parts of a request of which another part was refused, whatever its `on_disconnect` says."""
        for rid in rids:
            with suppress(RequestNotFound, RedisUnavailable):
                await self._batches.run(
                    model, requests.cancel(model, rid, tenant, "another part of the request was refused")
                )

    async def find(self, rid: str, tenant: str, model: str | None = None) -> tuple[ServedModel, dict[str, str]]:
        """The model and the hash of a request; looks in every model unless one is named, whatever its state. Raises
        RequestNotFound, and as `ModelRegistry.resolve`."""
        served = None
        if model is not None:
            served = await self._models.find(self._models.real_name(model)) or await self._models.resolve(model)
        places = [served] if served is not None else await self._models.all_served()
        looks = [self._batches.run(place.name, requests.follow(place.name, rid, "", tenant, 2**40)) for place in places]
        for place, outcome in zip(places, await asyncio.gather(*looks, return_exceptions=True), strict=True):
            if isinstance(outcome, requests.Followed):
                return place, outcome.fields
            if not isinstance(outcome, RequestNotFound):
                raise outcome
        raise RequestNotFound(f"No request {rid!r}. It may have ended more than its retention ago.")

    async def find_in(self, rid: str, tenant: str, model: str) -> tuple[ServedModel | None, dict[str, str]]:
        """As `find`, for a model that need not serve any more: None where its vocabulary is gone. Raises
        RequestNotFound, or ModelUnavailable where Redis has lost the model and may have lost the request."""
        try:
            followed = await self._batches.run(model, requests.follow(model, rid, "", tenant, 2**40))
        except RequestNotFound:
            self._models.check_lost(model)
            raise
        return await self._models.find(model), followed.fields

    async def resume(self, cursor: StreamCursor, caller: Caller, model: str | None) -> Session:
        """Follow a request from the places of the cursor, or from its beginning if it has none.

        Places prove that the request existed. If it is gone, Redis may have lost it a moment ago: another process that
        follows it gets the time to bring it back. Raises RequestNotFound if it is gone, or another tenant's.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        wait = self._settings.lost_wait if cursor.places else 0.0
        logged = False
        while True:
            try:
                return await self._follow(cursor, caller, model)
            except (RequestNotFound, ModelNotFound) as error:
                if clock() - began >= wait:
                    raise
                if not logged:
                    log.info("waits for a lost request", action="await_lost", rid=cursor.rid, why=str(error))
                    logged = True
            if self._shutdown.interrupted:
                raise ShuttingDown("This API process is shutting down. Send the request to another one.")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _follow(self, cursor: StreamCursor, caller: Caller, model: str | None) -> Session:
        served, fields = await self.find(cursor.rid, caller.tenant, model)
        view = decode_view(fields["view"])
        if view.member:
            raise RequestNotFound(f"{cursor.rid!r} is a part of another request; follow that one.")
        if len(cursor.places) not in (0, view.members):
            raise RequestError(
                f"Last-Event-ID has {len(cursor.places)} places, the stream has {view.members}.",
                param="last-event-id",
                code="invalid_event_id",
            )
        feeds = await self._feeds(served.name, caller.tenant, cursor.rid)
        for member in range(view.members):
            feeds.open(member_rid(cursor.rid, member))
        caller.request_log.know(model=served.name, resumed=True)
        return await self._join(feeds, served, caller, cursor)

    async def _feeds(self, model: str, tenant: str, rid: str) -> Feeds:
        """Feeds for the answer `rid`, without a member yet; subscribes to the model's events."""
        await self._follower.subscribe(model)
        return Feeds(self._follower, model, tenant, rid)

    def _open(self, feeds: Feeds, renderer: StreamRenderer, caller: Caller) -> Session:
        identity = caller.identity
        self._waits.add(caller.request_log, feeds)
        return Session(
            feeds=feeds,
            renderer=renderer,
            caller=caller,
            settings=self._settings,
            shutdown=self._shutdown,
            load_stage=partial(self._models.load_stage, feeds.model),
            complete=partial(self._archive.complete, feeds.rid, identity.owner),
            settle_limits=partial(self._limiter.settler.nudge, feeds.model) if identity.limited else None,
        )

    async def _join(
        self, feeds: Feeds, served: ServedModel, caller: Caller, cursor: StreamCursor | None = None
    ) -> Session:
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
        return self._open(feeds, renderer, caller)
