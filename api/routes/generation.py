"""The shared path of the generating endpoints: from a raw request to a stream or a whole body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from litestar import Request, Response
from litestar.background_tasks import BackgroundTask
from litestar.datastructures import Headers

from api.generation.client_request import Body, Caller
from api.generation.session import EventStream, Session
from api.http.connection import client_of
from api.http.errors import error_response, problem
from api.http.gate import ANONYMOUS, Identity, secret_of
from api.http.turns import off_loop
from api.images.loading import RequestImages
from api.models.models import ServedModel
from api.observability import RequestLog
from api.process import Process
from api.schemas.decoding import Warnings
from api.schemas.embeddings import InputsRequest
from api.schemas.view import parse_cursor
from control.errors import FurrowError, RequestError
from control.requests import new_rid

Http = Request[Any, Any, Any]

_IDENTITY = "identity"
_KEY = re.compile(r"[!-~]{1,255}")


def process_of(request: Http) -> Process:
    return request.app.state.process


async def identify(request: Http) -> None:
    """Before any handler: keep the caller's identity, or the error, for `identity_of`. Raises Forbidden by origin."""
    process = process_of(request)
    process.origins.check(request.method, request.headers)
    try:
        request.scope["state"][_IDENTITY] = await process.gate.identify(secret_of(request.scope["headers"]))
    except FurrowError as error:
        request.scope["state"][_IDENTITY] = error


def identity_of(request: Http) -> Identity:
    """The identity of the caller. Raises Unauthorized where a key is needed and none came, RedisUnavailable."""
    identity = request.scope["state"][_IDENTITY]
    if isinstance(identity, FurrowError):
        raise identity
    return identity


def authenticate(request: Http) -> str:
    """The tenant of a request. Raises as `identity_of`."""
    return identity_of(request).tenant


@asynccontextmanager
async def text_of(request: Http) -> AsyncGenerator[bytes]:
    """The body of a text route, as `Bodies.reading`, in a turn of the tenant. Raises as `authenticate`, and
    ClientDisconnected."""
    process = process_of(request)
    identity = identity_of(request)
    client = client_of(request.scope)
    most = process.models.most_text_bytes
    async with process.bodies.reading(request, most, identity.tenant if identity.account else "") as body:
        await client.turn_again()  # the first one ended if the body was waited for
        yield body
    client.admitted()


async def model_for(request: Http, name: str | None) -> ServedModel:
    """The model that the caller means. Raises as `ModelRegistry.resolve`, and ModelNotFound for one that its key
    doesn't open."""
    served = await process_of(request).models.resolve(name)
    identity_of(request).check_model(name, served.name)
    return served


def caller_of(request: Http) -> Caller:
    """The caller, with a fresh request id and a request log that has begun."""
    headers = request.headers  # made anew by each access
    client_request_id = headers.get("x-request-id")
    request_log = RequestLog(
        process_of(request).metrics,
        path=request.scope["path"],
        client_request_id=client_request_id,
        note_end=process_of(request).ended_requests.note,
    )
    rid = new_rid()
    request_log.know(rid=rid)
    identity = request.scope["state"][_IDENTITY]
    if not isinstance(identity, Identity):
        identity = ANONYMOUS
    elif identity.key is not None:
        request_log.know(key=identity.key.id)
    return Caller(
        request_log=request_log,
        identity=identity,
        images=RequestImages(identity.owner),
        rid=rid,
        on_disconnect=headers.get("x-on-disconnect"),
        client_request_id=client_request_id,
        client=client_of(request.scope),
        warnings=Warnings(strict=process_of(request).settings.strict),
    )


def _idempotency_key(headers: Headers) -> str:
    key = headers.get("idempotency-key", "")
    if key and not _KEY.fullmatch(key):
        raise RequestError(
            "Idempotency-Key must be 1 to 255 printable characters without white space.", param="idempotency-key"
        )
    return key


Accepted = Callable[[Session], Awaitable[Response[Any] | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """A parsed body. `accepted` is called once the request is queued; a response that it returns is sent at once."""

    body: Body | InputsRequest
    accepted: Accepted | None = None


Read = Callable[[bytes, Caller], Awaitable[ParsedBody | Response[Any]]]
"""Reads a body: into a request for a model, or a response that needs none."""


async def generate(request: Http, parse: Callable[[bytes, Warnings], Body | InputsRequest]) -> Response[Any]:
    """Serve one POST whose body is the whole request."""

    async def read(body: bytes, caller: Caller) -> ParsedBody:
        return ParsedBody(body=await off_loop(len(body), parse, body, caller.warnings))

    return await serve(request, read)


async def serve(request: Http, read: Read) -> Response[Any]:
    """Serve one POST: read, submit (or resume at Last-Event-ID), then stream or collect."""
    process = process_of(request)
    caller = caller_of(request)
    session: Session | None = None
    try:
        process.shutdown.refuse_when_draining()
        begun = await _begin(request, caller, read)
        if isinstance(begun, Response):
            caller.request_log.end(status=200, finish_reason=None)
            finish_headers(begun, caller)
            return begun
        session, streams, accepted = begun
        if accepted is not None and (response := await accepted(session)) is not None:
            finish_headers(response, caller)
            return response
        del accepted, begun
        if streams:
            await session.settle()
            return streamed(session, caller)
        response = await _whole(request, session)
        finish_headers(response, caller)
        return response
    except Exception as error:
        return refused(error, caller, session)
    except asyncio.CancelledError:
        # The process stops, and its grace is over.
        if session is not None:
            session.abandon()
        raise


async def _begin(request: Http, caller: Caller, read: Read) -> tuple[Session, bool, Accepted | None] | Response[Any]:
    """Submit or resume; the session, and True for a stream; or the response of `read`.

    Body and prompt are freed: the answer needs neither.
    """
    process = process_of(request)
    tenant = authenticate(request)
    headers = request.headers
    key = _idempotency_key(headers)
    last = headers.get("last-event-id")
    async with text_of(request) as body:
        caller = caller.identified(tenant, body, key)
        parsed = await read(body, caller)
        if isinstance(parsed, Response):
            return parsed
        caller.check_present(parsed.body.on_disconnect)
        if last and not parsed.body.stream:
            text = "Last-Event-ID continues a stream. Send 'stream': true with it, or leave it out."
            raise RequestError(text, param="last-event-id", code="invalid_event_id")
        if not last:
            return await process.sessions.submit(parsed.body, caller), bool(parsed.body.stream), parsed.accepted
        model = parsed.body.model
    del body, parsed  # a request that Redis has lost is waited for
    return await process.sessions.resume(parse_cursor(last), caller, model), True, None


def streamed(session: Session, caller: Caller) -> Response[Any]:
    """A stream, or the plain error where the request failed before anything was sent."""
    early = session.early_failure()
    if early is not None:
        return refused(early, caller, session)
    response = EventStream(session)
    finish_headers(response, caller)
    return response


def refused(error: Exception, caller: Caller, session: Session | None) -> Response[Any]:
    """The response for an error before the first byte; ends the request log."""
    answer = problem(error)
    status = answer.status
    text = answer.body.error.message
    if status == 500:
        caller.request_log.unexpected(error)
    if session is not None:
        session.release(status=status, error=text)
    caller.request_log.end(status=status, finish_reason=None, error=text)
    response = error_response(answer)
    response.headers["x-request-id"] = session.rid if session is not None else caller.rid
    finish_headers(response, caller)
    return response


async def _whole(request: Http, session: Session) -> Response[Any]:
    """Collect every choice, unless the client leaves first."""
    with client_of(request.scope).watched(session.client_left):
        pieces = await session.collect()
    await session.store()
    if session.renderer.failure is not None:
        raise session.renderer.failure

    async def release() -> None:
        # After the last byte: the client need not wait for Redis and the log.
        session.release(status=200, delivered=True)

    return Response(
        await off_loop(session.renderer.body_bytes, session.renderer.whole, pieces),
        status_code=200,
        media_type="application/json",
        headers={"x-request-id": session.rid},
        background=BackgroundTask(release),
    )


def finish_headers(response: Response[Any], caller: Caller) -> None:
    """Add the warnings, the rest of the key's limits, the milliseconds until here, and the client's own request id."""
    response.headers.update(caller.headers)
    if texts := caller.warnings.texts:
        response.headers.update(caller.warnings.headers)
        caller.request_log.warned(texts)
    response.headers["openai-processing-ms"] = str(round(1000 * caller.request_log.waited))
    if caller.client_request_id:
        response.headers["x-client-request-id"] = caller.client_request_id
