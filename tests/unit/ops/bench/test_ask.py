"""The load generator's client counts only whole answers: against servers that answer well, badly, or not to the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ops.harness.client import Base, ask, chat, request

USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
BROKEN = {"error": {"type": "server_error", "code": None}}
TEXT = {"choices": [{"index": 0, "delta": {"content": "hi"}}]}


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[Base]:
    """A server that reads one request, writes these bytes and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        await reader.readexactly(length)
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Base("127.0.0.1", server.sockets[0].getsockname()[1])


def head(status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(data: Any) -> bytes:
    text = data if isinstance(data, str) else json.dumps(data)
    return b"id: r-1:1.0\ndata: " + text.encode() + b"\n\n"


STREAM = head(transfer_encoding="chunked", x_request_id="r-1")
END = b"0\r\n\r\n"


async def test_a_stream_gives_its_times_and_tokens() -> None:
    """Comments and the empty role chunk are no text; events may be cut anywhere."""
    body = b": keep-alive\n" + event(ROLE) + event(TEXT) + event(TEXT) + event(USAGE) + event("[DONE]")
    async with answering(STREAM, *(chunk(body[i : i + 7]) for i in range(0, len(body), 7)), END) as base:
        answer = await ask(base, chat("demo", "hello", 2), user="user-0")
    assert (answer.rid, answer.tokens, answer.error) == ("r-1", 2, None)
    assert answer.first_ms is not None
    assert answer.sent_ms <= answer.first_ms <= answer.end_ms


async def test_a_whole_answer_gives_its_tokens() -> None:
    """Without a stream there is no first token to see."""
    body = json.dumps({"usage": {"prompt_tokens": 9, "completion_tokens": 5}}).encode()
    async with answering(head(content_length=str(len(body)), x_request_id="r-2"), body) as base:
        answer = await ask(base, chat("demo", "hello", 5, stream=False), user="user-0")
    assert (answer.rid, answer.tokens, answer.error, answer.first_ms) == ("r-2", 5, None, None)


REFUSAL = json.dumps({"error": {"message": "full", "type": "rate_limit_error", "code": "queue_full"}}).encode()


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([head(429, content_length=str(len(REFUSAL))), REFUSAL], "429 queue_full"),
        ([STREAM, chunk(event(ROLE) + event(BROKEN)), END], "in the stream: server_error"),
        ([STREAM, chunk(event(ROLE))], "connection cut"),
        ([STREAM, chunk(event(ROLE) + event(TEXT)), END], "no [DONE]"),
        ([STREAM, chunk(event(TEXT) + event(USAGE) + event("[DONE]")), END], "2 of 64 tokens"),
    ],
)  # fmt: skip
async def test_what_goes_wrong_has_a_kind(parts: list[bytes], kind: str) -> None:
    """A refusal, an error event, a cut, a missing end and missing tokens are told apart."""
    async with answering(*parts) as base:
        answer = await ask(base, chat("demo", "hello", 64), user="user-0")
    assert answer.error == kind


async def test_nobody_there_is_a_kind_too() -> None:
    """A refused connection is measured, not raised."""
    async with answering() as base:
        pass
    answer = await ask(base, chat("demo", "hello", 64), user="user-0")
    assert answer.error is not None
    assert answer.error.startswith("connection failed")


async def test_bodies_may_be_read_whole() -> None:
    """Chunks are joined."""
    parts = (head(transfer_encoding="chunked"), chunk(b"ab"), chunk(b"c"), END)
    async with answering(*parts) as base, request(base, "GET", "/v1/models") as response:
        assert (response.status, await response.read()) == (200, b"abc")


@pytest.mark.parametrize("url", ["https://x", "127.0.0.1:8000", "http://"])
def test_other_addresses_are_refused(url: str) -> None:
    """The message quotes the value."""
    with pytest.raises(ValueError, match="is not http://HOST:PORT"):
        Base.of(url)
