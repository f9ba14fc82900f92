"""One request and its attempts, without any I/O: where the next one goes, what it carries, and when to give up."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from ops.client.events import EventReader

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_REAPPEARS_WITHIN_S = 5.0
"""Time after a loss of Redis's data in which an API process that follows a request restores it."""
_AWAY = (502, 503)
_WHO = ("authorization", "x-api-key", "user-agent")


class ResumeRefused(httpx.ReadError):
    """A stream was cut, and the farm will not continue it: the request ended long ago, or belongs to another tenant."""


class Origins:
    """The base URLs of the farm's API processes. New requests go where the last one was answered."""

    def __init__(self, also: Sequence[str]) -> None:
        self._also = [httpx.URL(url) for url in also]
        self.current = 0

    def __len__(self) -> int:
        return 1 + len(self._also)

    def place(self, url: httpx.URL, at: int) -> httpx.URL:
        """`url` at origin number `at`; number 0 is its own. Paths are the same everywhere."""
        at %= len(self)
        if at == 0:
            return url
        other = self._also[at - 1]
        return url.copy_with(scheme=other.scheme, host=other.host, port=other.port)


def is_durable(request: httpx.Request) -> bool:
    """True if the request may be repeated: a POST of JSON (its key prevents double work), or following a stream."""
    if request.method == "POST":
        return request.headers.get("content-type", "").startswith("application/json")
    return request.method == "GET" and request.url.path.endswith("/events")


def is_stream(response: httpx.Response) -> bool:
    return response.status_code == 200 and response.headers.get("content-type", "").startswith("text/event-stream")


def with_stream(response: httpx.Response, stream: httpx.SyncByteStream | httpx.AsyncByteStream) -> httpx.Response:
    """`response` with another body."""
    return httpx.Response(response.status_code, headers=response.headers, stream=stream, extensions=response.extensions)


class Exchange:
    """A durable request whose body was read. Times are in seconds.

    `patience`: how long the farm may be away, counted from the last event. `silence`: a stream that says nothing for so
    long, not even a comment, is taken for cut.
    """

    def __init__(self, request: httpx.Request, origins: Origins, patience: float, silence: float) -> None:
        self._request = request
        self._origins = origins
        self._patience = patience
        self._silence = silence
        self._at = origins.current
        self._failures = 0
        self._progress_at = time.monotonic()
        self.reader = EventReader()
        self._headers = request.headers.copy()
        body = _json_object(request)
        self._streams = request.method == "GET" or bool(body.get("stream"))
        self._ours = False
        if request.method == "POST":
            # The client's own key or policy means that the request may be meant to outlive the client.
            self._ours = not ({"idempotency-key", "x-on-disconnect"} & set(self._headers)) and (
                "on_disconnect" not in body
            )
            self._headers.setdefault("idempotency-key", uuid.uuid4().hex)
            # A cut connection is not a client that left; one that leaves says so (see `goodbye`).
            self._headers.setdefault("x-on-disconnect", str(max(1, round(patience))))

    def attempt(self) -> httpx.Request:
        """The next request: the same bytes, to the current origin, from the last event on."""
        headers = self._headers.copy()
        url = self._origins.place(self._request.url, self._at)
        if url.netloc != self._request.url.netloc:
            headers["host"] = url.netloc.decode()
        if self.reader.last_id is not None:
            headers["last-event-id"] = self.reader.last_id
        extensions: dict[str, Any] = dict(self._request.extensions)
        if self._streams:
            timeout = dict(extensions.get("timeout") or {})
            timeout["read"] = min(timeout.get("read") or self._silence, self._silence)
            extensions["timeout"] = timeout
        return httpx.Request(
            self._request.method, url, headers=headers, content=self._request.content, extensions=extensions
        )

    def progressed(self) -> None:
        """Note an event: `patience` counts from now."""
        self._failures, self._progress_at = 0, time.monotonic()

    def failed(self, error: httpx.TransportError) -> float:
        """Seconds to wait before the next attempt, at another origin if there is one. Raises `error` at the end."""
        if isinstance(error, httpx.ReadTimeout) and not self._streams:
            raise error  # the caller's own limit
        pause = self._next_pause()
        if pause is None or not self.reader.resumable:
            raise error
        return pause

    def refused(self, response: httpx.Response) -> float | None:
        """Seconds to wait before the next attempt; None if this response is the answer. Raises ResumeRefused."""
        resuming = self.reader.last_id is not None
        status = response.status_code
        if status < 400:
            self._origins.current = self._at % len(self._origins)
            return None
        away = status in _AWAY and response.headers.get("x-should-retry") != "false"
        unknown = resuming and status == 404 and time.monotonic() - self._progress_at < _REAPPEARS_WITHIN_S
        if (away or unknown or (resuming and status == 429)) and (pause := self._next_pause(_retry_after(response))):
            return pause
        if resuming:
            raise self.not_continued(response)
        return None

    def not_continued(self, response: httpx.Response) -> ResumeRefused:
        """The error for a cut stream that was continued with another answer than its rest."""
        place = f"after event {self.reader.last_id}" if self.reader.last_id else "before its first event"
        return ResumeRefused(f"The stream was cut {place}, and continuing it was answered with {response.status_code}.")

    def goodbye(self) -> httpx.Request | None:
        """The request that cancels an unfinished answer; None if there is nothing to cancel."""
        if not self._ours or self.reader.ended or self.reader.last_id is None:
            return None
        rid = self.reader.last_id.partition(":")[0]
        path = self._request.url.path.partition("/v1/")[0] + f"/v1/requests/{rid}"
        url = self._origins.place(self._request.url, self._at).copy_with(path=path, query=None)
        headers = {name: value for name, value in self._headers.items() if name in _WHO}
        limits = dict.fromkeys(("connect", "read", "write", "pool"), 2.0)
        return httpx.Request("DELETE", url, headers=headers, extensions={"timeout": limits})

    def _next_pause(self, asked: float = 0.0) -> float | None:
        """Move on to the next origin; the first round is without a pause. None once `patience` is over."""
        self._at += 1
        self._failures += 1
        rounds = self._failures - len(self._origins)
        if rounds < 0:
            pause = 0.001
        else:
            pause = max(asked, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(rounds, 10)) * random.uniform(0.5, 1.0))
        over = time.monotonic() + pause - self._progress_at > self._patience
        return None if over else pause


def _json_object(request: httpx.Request) -> dict[str, Any]:
    try:
        body = json.loads(request.content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after-ms", "")) / 1000)
    except ValueError:
        value = response.headers.get("retry-after", "")
        return float(value) if value.isdecimal() else 0.0
