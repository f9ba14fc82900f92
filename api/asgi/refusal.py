"""Refusals that are written before a handler is known: a whole HTTP response, in the dialect of the path."""

from __future__ import annotations

import http

import msgspec

from api.errors.errors import problem_of
from api.errors.message_errors import PATH, anthropic_error
from api.errors.request_ids import new_rid


def refusal_bytes(url: bytes, status: int, message: str, code: str, retry_after: float | None = None) -> bytes:
    """The response, after which the connection closes. `url` is as much of the request's as has come."""
    found, rid = problem_of(status, message, code, retry_after), new_rid()
    headers = {"content-type": "application/json", "connection": "close", "x-request-id": rid, **found.headers}
    content = found.encode()
    if url.startswith(PATH.encode()):
        content = msgspec.json.encode(anthropic_error(found, rid))
        headers["request-id"] = rid
    headers["content-length"] = str(len(content))
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content
