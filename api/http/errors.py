"""The one place where errors become HTTP answers: statuses, OpenAI's error bodies, Anthropic's, and Ollama's."""

from __future__ import annotations

import http
import math
import random
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from api.schemas.answers import (
    UNTHREADED,
    Error,
    ErrorDetails,
    ErrorObject,
    MessageError,
    MessageErrorObject,
    OllamaError,
)
from control import errors
from control.requests import new_rid

log = structlog.stdlib.get_logger(__name__)

CLIENT_LEFT = 499
"""The status that is logged where the client left before its answer was over. No client sees it."""
CLIENT_LEFT_TEXT = "client disconnected"


class Unauthorized(errors.RequestError):
    """The server asks for an API key and the request brought none that it knows."""


class Forbidden(errors.RequestError):
    """The key is valid and does not give the right to this."""


class TooManyBodies(errors.FurrowError):
    """This process reads so many requests at once that its memory would not be bounded with one more."""


class BodyTooSlow(errors.FurrowError):
    """A body comes so slowly that it would hold its memory for too long."""


class ClientDisconnected(Exception):
    """The client has closed its connection, so that there is no reader of an answer."""


class GenerationFailed(errors.FurrowError):
    """A request ended in an error after it was accepted: a failure in the group, a cancel, a deadline, a failed model.

    `status` is for a client to which no byte was sent yet; `retry_after` in seconds, where trying again can help.
    """

    def __init__(self, message: str, *, code: str, status: int, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.retry_after = retry_after


class ShuttingDown(errors.FurrowError):
    """This process drains and takes nothing new."""


class StreamInterrupted(errors.FurrowError):
    """This process ends in the middle of an answer that goes on. `place`: id of the last event sent, if any."""

    def __init__(self, rid: str, place: str | None) -> None:
        how = f"Last-Event-ID: {place}" if place else "its Idempotency-Key"
        super().__init__(
            f"This API process is shutting down; the answer goes on. Send the same request again with {how}, or "
            f"GET /v1/requests/{rid}/events, to any API process; it waits for 30 seconds."
        )


class Problem(msgspec.Struct):
    """An error over HTTP. `retry_after` in seconds, where trying again can help; `final`: SDKs must not try again."""

    status: int
    body: Error
    retry_after: float | None = None
    final: bool = False
    allow: str | None = None
    """The methods that a URL knows, for a 405."""

    def encode(self) -> bytes:
        return msgspec.json.encode(self.body)

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
            headers["retry-after-ms"] = str(max(1, round(self.retry_after * 1000)))
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.final:
            headers["x-should-retry"] = "false"
        if self.allow is not None:
            headers["allow"] = self.allow
        return headers


# Characters. A message has the value that is refused, which may be megabytes.
_LONGEST_MESSAGE = 2000
_LONGEST_PARAM = 200
_LONGEST_RETRY_S = 60.0
"""SDKs wait no longer, whatever they are told."""


def _spread(seconds: float) -> float:
    """Up to a quarter more: the clients that were refused together must not come back together."""
    return min(_LONGEST_RETRY_S, seconds * random.uniform(1.0, 1.25))


_REFUSED: list[tuple[type[errors.RequestError], int, str | None]] = [
    (Unauthorized, 401, "invalid_api_key"),
    (Forbidden, 403, "forbidden"),
    (errors.ModelNotFound, 404, None),
    (errors.RequestNotFound, 404, "request_not_found"),
    (errors.KeyNotFound, 404, None),
    (errors.LetterNotFound, 404, None),
    (errors.LogConflict, 409, None),
    (errors.IdempotencyConflict, 409, "idempotency_conflict"),
    (errors.RequestTooLarge, 413, "request_too_large"),
    (errors.TemplateFailed, 422, "template_failed"),
    (errors.ModelFileRefused, 422, None),
    (errors.RequestError, 400, None),
]
"""Status and default code of errors in a request; the first class that fits counts."""
_FAILED: list[tuple[type[Exception], int, str, Callable[[Any], float | None]]] = [
    (errors.QueueFull, 429, "rate_limit_exceeded", lambda error: _spread(error.retry_after)),
    (errors.ImagesFull, 429, "rate_limit_exceeded", lambda _: _spread(2.0)),
    (errors.RateLimited, 429, "rate_limit_exceeded", lambda error: error.retry_after),
    (TooManyBodies, 429, "rate_limit_exceeded", lambda _: _spread(1.0)),
    (BodyTooSlow, 408, "request_timeout", lambda _: None),
    (ClientDisconnected, CLIENT_LEFT, "client_disconnected", lambda _: None),
    (errors.SettingsError, 400, "invalid_setting", lambda _: None),
    (errors.DevicesError, 400, "invalid_setting", lambda _: None),
    (errors.ModelUnavailable, 503, "model_unavailable", lambda error: error.retry_after),
    (errors.RedisFull, 503, "redis_full", lambda _: _spread(5.0)),
    (errors.RedisUnavailable, 503, "unavailable", lambda _: 1.0),
    (ShuttingDown, 503, "shutting_down", lambda _: 1.0),
    (StreamInterrupted, 503, "stream_interrupted", lambda _: 1.0),
]
"""Status, code and seconds until a retry of other errors; the first class that fits counts."""
_TEXTS: dict[str, str] = {
    "client_disconnected": CLIENT_LEFT_TEXT,
    "unavailable": "The farm's Redis can't be used just now. Retry shortly.",
}
"""Messages in place of the error's own, by code."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def problem(error: BaseException, route: str = "this request") -> Problem:
    """Map any error to its status and body; an unexpected one is a 500 that tells nothing of the inside.

    `route`: method and path, for the refusals that are about them.
    """
    if isinstance(error, errors.RequestError):
        status, code = next((status, code) for kind, status, code in _REFUSED if isinstance(error, kind))
        refusal = problem_of(status, str(error), error.code or code, param=error.param)
        refusal.final = status == 409
        return refusal
    for kind, status, code, retry_after in _FAILED:
        if isinstance(error, kind):
            return problem_of(status, _TEXTS.get(code, str(error)), code, retry_after(error))
    if isinstance(error, GenerationFailed):
        refusal = problem_of(error.status, str(error), error.code, error.retry_after)
        refusal.final = error.retry_after is None
        return refusal
    if isinstance(error, HTTPException):
        return _framework_problem(error, route)
    return problem_of(500, "The server failed on this request; it is logged.", "internal_error")


_ELSEWHERE = re.compile(
    r"^\w+ (?:/v1)?/(messages/batches|assistants|audio|batches|chatkit|containers|conversations|engines|evals|files"
    r"|fine_tuning|images|moderations|organization|realtime|rerank|score|threads|uploads|vector_stores|videos)\b"
)
"""Routes of OpenAI or other servers, after the method, that this one has not."""


def _framework_problem(error: HTTPException, route: str) -> Problem:
    """A refusal by the framework before a handler ran: no such route, wrong method, body too large, bad path."""
    status = error.status_code
    elsewhere = _ELSEWHERE.search(route)
    hint = (
        "This server generates text and has no such endpoint"
        if elsewhere
        else "Check it for typos; a path is as /v1/models, or without /v1"
    )
    parameter = _wrong_parameter(error)
    if parameter is not None:
        return parameter
    text = {
        404: f"Unknown request URL: {route}. {hint}; /schema lists what there is.",
        405: f"Method not allowed: {route}. Use {_allowed(error) or 'another method'}.",
    }.get(status, str(error.detail))
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
    # OpenAI says so of an unknown URL too.
    refusal = problem_of(status, text, code, kind="invalid_request_error" if status < 500 else None)
    if status == 405:
        refusal.allow = _allowed(error)
    return refusal


def _wrong_parameter(error: HTTPException) -> Problem | None:
    """A parameter in the URL that could not be read."""
    wrong: Any = error.extra[0] if isinstance(error, ValidationException) and isinstance(error.extra, list) else None
    if not isinstance(wrong, dict) or "key" not in wrong:
        return None
    text = f"Invalid value for '{wrong['key']}' in the URL: {wrong.get('message', 'it can not be read')}."
    return problem_of(400, text, "invalid_type", param=wrong["key"])


def _allowed(error: HTTPException) -> str | None:
    headers = error.headers or {}
    return headers.get("allow") or headers.get("Allow")


def problem_of(
    status: int,
    message: str,
    code: str | None,
    retry_after: float | None = None,
    *,
    param: str | None = None,
    kind: str | None = None,
) -> Problem:
    """An error by its status; `kind` is the error's type, by default that of the status."""
    if len(message) > _LONGEST_MESSAGE:
        message = f"{message[: _LONGEST_MESSAGE // 2]} … {message[-_LONGEST_MESSAGE // 2 :]}"
    kind = kind or _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    detail = ErrorObject(message=message, type=kind, param=param and param[:_LONGEST_PARAM], code=code)
    return Problem(status=status, body=Error(error=detail), retry_after=retry_after)


def handle(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The application's handler for every exception."""
    refusal = problem(error, f"{request.method} {request.url.path}")
    rid = new_rid()
    if refusal.status == 500 and not isinstance(error, GenerationFailed):
        log.error("request failed unexpectedly", action="http_error", path=request.url.path, rid=rid, exc_info=error)
    if isinstance(error, ClientDisconnected):
        log.info("the client left during its upload", action="client_left", path=request.url.path, rid=rid)
    response = error_response(refusal, request_id=request.headers.get("x-request-id"))
    response.headers["x-request-id"] = rid
    return response


def error_response(refusal: Problem, request_id: str | None = None) -> Response[bytes]:
    headers = dict(refusal.headers)
    if request_id:
        headers["x-client-request-id"] = request_id
    return Response(refusal.encode(), status_code=refusal.status, media_type="application/json", headers=headers)


_PATH = re.compile(r"(/v1)*/messages\b")
_OLLAMA_PATH = re.compile(r"(/v1)*/api/")
HEADER = "anthropic-version"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str, versioned: bool) -> bool:
    """True for a request in Anthropic's API: by its path or, on a path of several APIs, by the header of its SDKs."""
    return versioned or _PATH.match(path) is not None


def anthropic_error(problem: Problem, request_id: str | None) -> MessageError:
    """The body, and the data of an event, for an error."""
    kind = _TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    error = MessageErrorObject(kind, problem.body.error.message)
    if problem.body.error.code == UNTHREADED:
        error.details = ErrorDetails(UNTHREADED, ["thread"])
    return MessageError(error, request_id)


def is_ollama(path: str) -> bool:
    """True for a request in Ollama's API."""
    return _OLLAMA_PATH.match(path) is not None


def ollama_error(problem: Problem) -> OllamaError:
    """The body, and the line of a stream, for an error."""
    return OllamaError(problem.body.error.message)


async def in_anthropic_shape(response: Response[Any]) -> Response[Any]:
    """Litestar's `after_request` for the routes of this API."""
    return shaped(response)


async def in_ollama_shape(response: Response[Any]) -> Response[Any]:
    """Litestar's `after_request` for the routes of this API."""
    return ollama_shaped(response)


def handle_in_shape(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """The application's handler for every exception, in the dialect of the request."""
    response: Response[Any] = handle(request, error)
    if is_ollama(request.scope["path"]):
        return ollama_shaped(response)
    anthropic = is_anthropic(request.scope["path"], HEADER in request.headers)
    return shaped(response) if anthropic else response


def shaped(response: Response[Any]) -> Response[Any]:
    """Ids under Anthropic's name, errors in its shape."""
    request_id = response.headers.get("x-request-id")
    if request_id:
        response.headers["request-id"] = request_id
    if (refusal := _refusal_in(response)) is not None:
        response.content = msgspec.json.encode(anthropic_error(refusal, request_id))
    return response


def ollama_shaped(response: Response[Any]) -> Response[Any]:
    """Errors in Ollama's shape."""
    if (refusal := _refusal_in(response)) is not None:
        response.content = msgspec.json.encode(ollama_error(refusal))
    return response


def _refusal_in(response: Response[Any]) -> Problem | None:
    """The error that a response is; None for another response."""
    if not response.status_code or response.status_code < 400 or not isinstance(response.content, bytes):
        return None
    return Problem(status=response.status_code, body=msgspec.json.decode(response.content, type=Error))


def refusal(
    path: str, sent: Iterable[tuple[bytes, bytes]], status: int, message: str, code: str, retry_after: float | None
) -> tuple[dict[str, str], bytes]:
    """Headers and content for a request with this path and the headers `sent`."""
    problem = problem_of(status, message, code, retry_after)
    rid = new_rid()
    headers = {"content-type": "application/json", "x-request-id": rid, **problem.headers}
    content = problem.encode()
    if is_ollama(path):
        content = msgspec.json.encode(ollama_error(problem))
    elif is_anthropic(path, any(name == HEADER.encode() for name, _ in sent)):
        content = msgspec.json.encode(anthropic_error(problem, rid))
        headers["request-id"] = rid
    headers["content-length"] = str(len(content))
    return headers, content


def refusal_bytes(request: object, status: int, message: str, code: str, retry_after: float | None = None) -> bytes:
    """The response, after which the connection closes. `request` has `url` and `headers`, as far as they have come."""
    url: bytes = getattr(request, "url", None) or b""
    sent: list[tuple[bytes, bytes]] = getattr(request, "headers", None) or []
    headers, content = refusal(url.decode("latin-1"), sent, status, message, code, retry_after)
    headers["connection"] = "close"
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content
