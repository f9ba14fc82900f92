"""An HTTP/1.1 client on plain asyncio streams, and an answer of the API as a client sees it.

The load generator must cost less than what it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from control.errors import FurrowError
from ops.client.events import Event, EventParser

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LIMIT_S = 600.0
"""For a whole answer: far above any scenario's, so that only a hang reaches it."""


@dataclass(frozen=True, slots=True)
class Base:
    """The address of the API."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Base:
        """Raises ValueError for anything but http://HOST[:PORT]; a path such as /v1 is dropped."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80)


@dataclass(slots=True)
class Response:
    """Status and headers (lower-case names); the body is read by `chunks`, `read` or `events`."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises IncompleteReadError where the connection is cut before its end."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await _line(self._reader)).partition(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await _line(self._reader)
        else:
            yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self) -> AsyncIterator[Event]:
        """Each server-sent event; comments are skipped. Ends where the body ends."""
        parser = EventParser()
        async for chunk in self.chunks():
            for event in parser.feed(chunk):
                if event.data:
                    yield event


@asynccontextmanager
async def request(
    base: Base, method: str, path: str, *, body: bytes | dict[str, Any] = b"", headers: dict[str, str] | None = None
) -> AsyncGenerator[Response]:
    """Send a request on a connection of its own; yields the response once its headers are there. Raises OSError.

    A body that is an object is sent as JSON.
    """
    reader, writer = await asyncio.open_connection(base.host, base.port, limit=2**20)
    try:
        fields = dict(headers or {})
        if isinstance(body, dict):
            body = json.dumps(body).encode()
            fields["content-type"] = "application/json"
        lines = [f"{method} {path} HTTP/1.1", f"host: {base.host}:{base.port}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        status = int((await _line(reader)).split()[1])
        received: dict[str, str] = {}
        while line := await _line(reader):
            name, _, value = line.decode("latin-1").partition(":")
            received[name.strip().lower()] = value.strip()
        yield Response(status, received, reader)
    finally:
        writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """One line without its end. Raises IncompleteReadError at the end of the connection."""
    return (await reader.readuntil(b"\r\n"))[:-2]


# --- answers ----------------------------------------------------------------------------------------------------------


class RequestFailed(FurrowError):
    """A request of a benchmark was not answered as it should be."""


@dataclass(slots=True)
class Answer:
    """Times with `_ms` are ms since 1970, the others seconds of the monotonic clock; both clocks are this machine's."""

    user: str = ""
    model: str = ""
    rid: str = ""
    identity: str = ""
    """`id` of the body or of the first chunk."""
    sent: float = 0.0
    sent_ms: float = 0.0
    first_ms: float | None = None
    """First text at the client; streams only."""
    end_ms: float = 0.0
    stamps: list[float] = field(default_factory=list[float])
    """When each part of a choice came."""
    texts: list[str] = field(default_factory=list[str])
    """The text of each of these parts."""
    token_ids: list[int] = field(default_factory=list[int])
    """Empty unless the request asks for them."""
    finish: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retry_after_s: float | None = None
    """The Retry-After of a refusal."""
    error: str | None = None
    """The kind of failure; None for a success."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def first_s(self) -> float:
        """Seconds from the request to the first part of the answer."""
        return self.stamps[0] - self.sent

    def check(self) -> Answer:
        """The answer itself. Raises RequestFailed for a failure."""
        if self.error is not None:
            raise RequestFailed(f"a request to {self.model} failed: {self.error}")
        return self


def now_ms() -> float:
    return time.time_ns() / 1e6


def chat(model: str, text: str, max_tokens: int, stream: bool = True, **fields: Any) -> dict[str, Any]:
    """The body of a greedy chat of exactly `max_tokens` tokens: every request costs the same, whatever is said."""
    messages = [{"role": "user", "content": text}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | {"stream": stream} | fields


def completion(model: str, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The same of a streamed completion."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body | {"stream": True} | fields


async def ask(base: Base, body: dict[str, Any], *, user: str = "", exact: bool | None = None) -> Answer:
    """One answer. Never raises for what the server or the network did: that is a measurement too.

    `user` is a bearer token, "" for none. `exact`: fewer tokens than `max_tokens` are a failure; as `ignore_eos` says
    unless it is given.
    """
    answer = Answer(user, body.get("model", ""), sent=time.monotonic(), sent_ms=now_ms())
    headers = {"authorization": f"Bearer {user}"} if user else {}
    path = CHAT if "messages" in body else COMPLETIONS
    streams = body.get("stream", False)
    if streams:
        body = {"stream_options": {"include_usage": True}} | body
    try:
        async with asyncio.timeout(LIMIT_S), request(base, "POST", path, body=body, headers=headers) as response:
            answer.rid = response.headers.get("x-request-id", "")
            if "retry-after" in response.headers:
                answer.retry_after_s = float(response.headers["retry-after"])
            await (_read_stream if streams and response.status == 200 else _read_whole)(response, answer)
    except TimeoutError:
        answer.error = "timeout"
    except asyncio.IncompleteReadError:
        answer.error = "connection cut"
    except OSError as error:
        answer.error = f"connection failed: {error.strerror or error}"
    answer.end_ms = now_ms()
    expected = body.get("max_tokens", 0) * body.get("n", 1)
    if answer.error is None and answer.tokens != expected and (body.get("ignore_eos") if exact is None else exact):
        answer.error = f"{answer.tokens} of {expected} tokens"
    return answer


async def _read_whole(response: Response, answer: Answer) -> None:
    text = await response.read()
    try:
        body = json.loads(text)
    except ValueError:
        body = {"error": text.decode(errors="replace")[:300]}
    if response.status == 200 and "error" not in body:
        _take(answer, body)
    else:
        answer.error = f"{response.status} {kind_of(body)}"


async def _read_stream(response: Response, answer: Answer) -> None:
    done = False
    async for _, data, _ in response.events():
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = f"in the stream: {kind_of(chunk)}"
        _take(answer, chunk)
        if answer.first_ms is None and answer.texts and answer.texts[-1]:
            answer.first_ms = now_ms()
    if not done and answer.error is None:
        answer.error = "no [DONE]"


def _take(answer: Answer, body: dict[str, Any]) -> None:
    """Add a whole answer, or a chunk of one."""
    answer.identity = answer.identity or body.get("id", "")
    for choice in body.get("choices", ()):
        message = choice.get("delta") or choice.get("message") or choice
        answer.stamps.append(time.monotonic())
        answer.texts.append(message.get("content") or message.get("text") or "")
        answer.token_ids += choice.get("token_ids") or ()
        answer.finish = choice.get("finish_reason") or answer.finish
    if usage := body.get("usage"):
        answer.tokens, answer.prompt_tokens = usage.get("completion_tokens", 0), usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def kind_of(body: Any) -> str:
    """The machine-readable reason of an error body."""
    error = body.get("error", {}) if isinstance(body, dict) else {}
    if isinstance(error, str):
        return error
    return str(error.get("code") or error.get("type") or "without a reason")


# --- prompts ----------------------------------------------------------------------------------------------------------

_TEXT = (
    "count from one to nine and tell me what a leader does when a rank of its group has died while the farm "
    "was busy with the requests of many users who all wait for their tokens"
)


def prompt(index: int, length: int) -> str:
    """A text of exactly `length` ASCII characters (at least the number's), the same for the same `index`, and different
    from others from its first word on, so that no cache answers for the engine."""
    text = f"{index}:"
    step = index % 7 + 1
    words = _TEXT.split()
    at = index
    while len(text) < length:
        text += " " + words[at % len(words)]
        at += step
    return text[: max(length, len(f"{index}:"))]
