"""Raw SSE for the tests that watch ids and resume: what the official client hides."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ops.client.events import parsed


@dataclass
class Received:
    """A client's part of a stream so far, over all its connections."""

    text: str = ""
    finish: str | None = None
    last_id: str = ""
    ids: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)

    def take(self, event_id: str, event: dict[str, Any]) -> None:
        """Add one event."""
        if "error" in event:
            self.errors.append(event["error"])
        for choice in event.get("choices", []):
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish
        self.last_id = event_id
        self.ids.append(event_id)


def open_stream(address: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    """POST a streamed chat completion; the response, whose status is not checked."""
    connection = http.client.HTTPConnection(address, timeout=90)
    # With this header the response owns the socket, and closing it is enough.
    sent = {"Content-Type": "application/json", "Connection": "close", **(headers or {})}
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}), sent)
    return connection.getresponse()


def receive(response: http.client.HTTPResponse, into: Received) -> Iterator[Received]:
    """Read events into `into`, yielding after each; returns at [DONE] or when the connection is cut."""
    with response:
        for event in parsed(response):
            if event.data == b"[DONE]":
                return
            if event.data:
                into.take(event.id or into.last_id, json.loads(event.data))
                yield into
