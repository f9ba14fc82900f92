"""Errors as /v1/messages tells them: Anthropic's shape and types."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from litestar import Request, Response

from api.errors.errors import ErrorBody, Problem, handle

_PATH = re.compile(r"(/v1)*/messages\b")
HEADER = "anthropic-version"
UNTHREADED = "thread_unsupported_request"
"""Anthropic's code for a request that can't be part of a conversation that the server keeps."""

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


def anthropic_error(found: Problem, request_id: str | None) -> dict[str, Any]:
    """The body, and the data of an event, for an error."""
    kind = _TYPES.get(found.status, "invalid_request_error" if found.status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": found.body.error.message}
    if found.body.error.code == UNTHREADED:
        told["details"] = {"error_code": UNTHREADED, "unsupported": ["thread"]}
    return {"type": "error", "error": told, "request_id": request_id}


async def in_anthropic_shape(response: Response[Any]) -> Response[Any]:
    """Litestar's `after_request` for the routes of this API."""
    return shaped(response)


def handle_in_shape(request: Request[Any, Any, Any], error: Exception) -> Response[Any]:
    """The application's handler for every exception, in the dialect of the request."""
    response: Response[Any] = handle(request, error)
    anthropic = is_anthropic(request.scope["path"], HEADER in request.headers)
    return shaped(response) if anthropic else response


def shaped(response: Response[Any]) -> Response[Any]:
    """Ids under Anthropic's name, errors in its shape."""
    request_id = response.headers.get("x-request-id")
    if request_id:
        response.headers["request-id"] = request_id
    if response.status_code and response.status_code >= 400 and isinstance(response.content, bytes):
        body = msgspec.json.decode(response.content, type=ErrorBody)
        found = Problem(status=response.status_code, body=body)
        response.content = msgspec.json.encode(anthropic_error(found, request_id))
    return response
