"""One streamed answer: read in a thread, so that Ctrl-C can end the wait for it at any time."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from ops.client.events import parsed

POSITION = re.compile(rb": ?queue position (\d{1,9})(?:, expected wait (\d{1,12}) ms)?\b.*\s*")
"""The comment of a stream whose request waits."""
LEAVE_S = 3.0
"""Limit of the wait for the end of a request that was cancelled."""


class Piece(NamedTuple):
    """A part of the answer; `reasoning`: of the thoughts before it. `position`: no text, but the place in the queue in
    which the request waits, from 1, and the time that it is expected to wait, where that is known."""

    text: str
    reasoning: bool = False
    position: int = 0
    wait_ms: int | None = None


@dataclass
class AnswerFigures:
    """Times in seconds from the request; tokens as the farm counts them."""

    first_s: float = 0.0
    last_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first one; None for fewer than two tokens."""
        seconds = self.last_s - self.first_s
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None


class StreamedAnswer:
    """Iterate over its pieces; `text`, `finish`, `error` and `figures` are those so far. Call `close` at the end."""

    def __init__(self, http: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self.text = ""
        self.finish = ""
        self.error = ""
        """The reason for which the answer did not come to its end."""
        self.figures = AnswerFigures()
        self._http = http
        self._path = path
        self._body = body
        self._rid = ""
        self._cancelled = threading.Event()
        self._began = time.monotonic()
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="answer", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Piece]:
        while (piece := self._pieces.get()) is not None:
            yield piece

    def close(self) -> None:
        """Cancel the request on the farm, unless it has ended."""
        self._cancelled.set()
        if self._thread.is_alive() and self._rid:
            self._delete()
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends the wait
            self._thread.join(LEAVE_S)

    def _run(self) -> None:
        try:
            with self._http.stream("POST", self._path, json=self._body) as response:
                self._rid = response.headers.get("x-request-id", "")
                if response.status_code != 200:
                    self.error = message_of(response)
                    return
                if self._cancelled.is_set():
                    self._delete()  # the transport cancels only what has sent an event
                self._read(response)
        except Exception as error:  # of HTTP, or of an answer that is none: an end without a reason would look whole
            self.error = f"{error or type(error).__name__}"
        finally:
            self._pieces.put(None)

    def _read(self, response: httpx.Response) -> None:
        for event in parsed(response.iter_raw()):
            if self._cancelled.is_set():
                return
            if event.data.startswith(b"{"):
                self._take(json.loads(event.data))
            elif place := POSITION.fullmatch(event.raw):
                self._pieces.put(Piece("", position=int(place[1]), wait_ms=None if place[2] is None else int(place[2])))
        if not self.finish and not self.error:
            self.error = "The stream ended before the answer did."

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"].get("message"))
        if usage := chunk.get("usage"):
            self.figures.prompt_tokens = usage["prompt_tokens"]
            self.figures.tokens = usage["completion_tokens"]
        for choice in chunk.get("choices", []):
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice.get("delta") or {}
            self._put(Piece(delta.get("reasoning_content") or "", reasoning=True))
            self._put(Piece(delta.get("content") or choice.get("text") or ""))

    def _put(self, piece: Piece) -> None:
        if not piece.text:
            return
        self.figures.last_s = time.monotonic() - self._began
        self.figures.first_s = self.figures.first_s or self.figures.last_s
        self.text += "" if piece.reasoning else piece.text
        self._pieces.put(piece)

    def _delete(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self._http.delete(f"/v1/requests/{self._rid}", timeout=LEAVE_S)


def message_of(response: httpx.Response) -> str:
    """The message of a refusal, in OpenAI's form or in plain text."""
    try:
        body = json.loads(response.read())
        return str(body["error"]["message"])
    except (ValueError, KeyError, TypeError, httpx.HTTPError):
        return f"HTTP status {response.status_code}"
