"""Refusals that are written before a handler is known: a whole HTTP response, in the dialect of the request."""

from __future__ import annotations

import http

import msgspec

from api.errors.errors import problem_of
from api.errors.message_errors import HEADER, anthropic_error, is_anthropic
from api.errors.request_ids import new_rid


def refusal_bytes(asked: object, status: int, message: str, code: str, retry_after: float | None = None) -> bytes:
    """The response, after which the connection closes. `asked` has `url` and `headers`, as far as they have come."""
    found, rid = problem_of(status, message, code, retry_after), new_rid()
    headers = {"content-type": "application/json", "connection": "close", "x-request-id": rid, **found.headers}
    content = found.encode()
    url: bytes = getattr(asked, "url", None) or b""
    sent: list[tuple[bytes, bytes]] = getattr(asked, "headers", None) or []
    if is_anthropic(url.decode("latin-1"), any(name == HEADER.encode() for name, _ in sent)):
        content = msgspec.json.encode(anthropic_error(found, rid))
        headers["request-id"] = rid
    headers["content-length"] = str(len(content))
    lines = [f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content
