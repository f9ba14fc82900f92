"""Refusals that are written before a handler is known: a whole HTTP response, in the dialect of the request."""

from __future__ import annotations

import http
from collections.abc import Iterable

import msgspec

from api.errors.errors import HEADER, anthropic_error, is_anthropic, problem_of
from control.requests import new_rid


def refusal(
    path: str, sent: Iterable[tuple[bytes, bytes]], status: int, message: str, code: str, retry_after: float | None
) -> tuple[dict[str, str], bytes]:
    """Headers and content for a request with this path and the headers `sent`."""
    found, rid = problem_of(status, message, code, retry_after), new_rid()
    headers = {"content-type": "application/json", "x-request-id": rid, **found.headers}
    content = found.encode()
    if is_anthropic(path, any(name == HEADER.encode() for name, _ in sent)):
        content = msgspec.json.encode(anthropic_error(found, rid))
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
