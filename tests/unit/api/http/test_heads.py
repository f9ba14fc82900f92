"""Heads and connections are bounded: sizes, lines, time, pipelined requests, connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from uvicorn.server import ServerState

from api.http.bodies import KIB
from api.http.connection import ClientConnection, ConnectionLimits, ServerConfig

LIMITS = ConnectionLimits(
    head_bytes=4 * KIB,
    head_lines=32,
    head_timeout=0.3,
    heads_bytes=8 * KIB,
    connections=8,
    pipelined=4,
    rest_bytes=64 * KIB,
)
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


class Farm:
    """A server of a small application that says how much of a body it read; `/slow` waits for `release`."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.release, self.left, self.asked = asyncio.Event(), 0, 0

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self.answer(scope, receive, send)

        self.config = ServerConfig(
            app, http=ClientConnection, reader_timeout=60, limits=limits, log_config=None, lifespan="off"
        )
        self.config.load()
        self.state = ServerState()
        self.port = 0

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        size = 0
        if scope["path"] == "/slow":
            waits = asyncio.ensure_future(self.release.wait())
            while not waits.done():
                message = asyncio.ensure_future(receive())
                await asyncio.wait([waits, message], return_when=asyncio.FIRST_COMPLETED)
                if message.done() and message.result()["type"] == "http.disconnect":
                    waits.cancel()
                    self.left += 1
                    return
        elif scope["path"] != "/unread" and scope["method"] == "POST":
            while True:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body"):
                    break
        content = str(size).encode()
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        """As much of it as the server takes."""
        self.writer.write(data)
        with suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(self.writer.drain(), 5)

    async def answer(self) -> tuple[int, bytes]:
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), await self.reader.readexactly(length)

    async def refusal(self) -> tuple[int, str, str]:
        """Status, code and message; then the connection has ended."""
        status, body = await self.answer()
        error = json.loads(body)["error"]
        assert await self.ended() == b""
        return status, error.get("code") or error["type"], error["message"]

    async def ended(self) -> bytes:
        try:
            return await asyncio.wait_for(self.reader.read(), 5)
        except ConnectionError:
            return b""


@pytest.fixture
async def farm() -> AsyncIterator[Farm]:
    farm = Farm(LIMITS)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ClientConnection(farm.config, farm.state, {}), "127.0.0.1", 0)
    farm.port = server.sockets[0].getsockname()[1]
    yield farm
    farm.release.set()
    server.close()
    for connection in list(farm.state.connections):
        connection.abort()  # type: ignore[union-attr]
    while farm.state.connections or farm.state.tasks:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"a: b\r\n" * 1000,
        HEAD + b"x-long: " + b"a" * 5000,
        HEAD + b"".join(b"x-%d: %s\r\n" % (i, b"a" * 300) for i in range(20)) + b"\r\n",
        HEAD + b"a: b\r\n" * 33 + b"\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nt: " + b"a" * 50_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"t: a\r\n" * 40,
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"a" * 50_000,
    ],
    ids=["count", "size", "sum", "lines", "url", "trailer", "trailers", "chunk-extension"],
)
async def test_too_much_around_a_body(farm: Farm, head: bytes) -> None:
    """431 with the limit in its words, whether it comes at once or bit by bit; nothing is answered beside it."""
    for size in (len(head), 700):
        async with farm.client() as client:
            for start in range(0, len(head), size):
                await client.send(head[start : start + size])
                await asyncio.sleep(0)
            status, code, message = await client.refusal()
            assert (status, code) == (431, "request_header_fields_too_large")
            assert "4 KiB" in message or "32 header lines" in message


async def test_a_flood_is_not_kept(farm: Farm) -> None:
    """Beyond the limit what comes is dropped, and the connection is reset once it goes on for too long."""
    async with farm.client() as client:
        await client.send(HEAD)
        sent = 0
        while sent < 64 * 1024 * KIB and not client.writer.transport.is_closing():
            await client.send(b"a: b\r\n" * 10_000)
            sent += 60_000
        assert sent < 16 * 1024 * KIB
        assert farm.config.waiting.held_bytes == 0


async def test_the_refusal_has_the_dialect_of_its_path(farm: Farm) -> None:
    async with farm.client() as client:
        await client.send(b"POST /v1/messages HTTP/1.1\r\n" + b"a: b\r\n" * 1000)
        status, body = await client.answer()
        assert status == 431 and json.loads(body)["type"] == "error"


async def test_what_is_no_http(farm: Farm) -> None:
    async with farm.client() as client:
        await client.send(b"\x16\x03\x01\x02\x00 this is TLS")
        assert (await client.refusal())[:2] == (400, "bad_request")


@pytest.mark.parametrize("head", [b"GET", HEAD, b"\r\n\r\n"])
async def test_a_slow_head_is_408(farm: Farm, head: bytes) -> None:
    """Line after line comes before the time is over, and yet the head has only its own time."""
    async with farm.client() as client:
        await client.send(head)

        async def trickle() -> None:
            while True:
                await asyncio.sleep(0.05)
                await client.send(b"" if head == b"GET" else b"a: b\r\n" if head == HEAD else b"\r\n")

        slow = asyncio.ensure_future(trickle())
        status, code, message = await client.refusal()
        slow.cancel()
        assert (status, code) == (408, "request_timeout") and "0.3 s" in message


async def test_a_connection_without_a_request_ends(farm: Farm) -> None:
    async with farm.client() as client:
        assert await client.ended() == b""


async def test_the_time_begins_anew_with_each_request(farm: Farm) -> None:
    """Requests over one connection for longer than a head may take, the last one in two halves."""
    async with farm.client() as client:
        for _ in range(5):
            await client.send(HEAD + b"content-")
            await asyncio.sleep(0.1)
            await client.send(b"length: 3\r\n\r\nabc")
            assert await client.answer() == (200, b"3")


async def test_a_large_body_is_no_head(farm: Farm) -> None:
    """With and without a length, in small and in large chunks."""
    body = b"x" * 50_000
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:1], body[1:9000], body[9000:]))
    async with farm.client() as client:
        await client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert await client.answer() == (200, b"50000")
        await client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked + b"0\r\nt: a\r\n\r\n")
        assert await client.answer() == (200, b"50000")


async def test_beyond_the_limit_the_longest_idle_connection_closes(farm: Farm) -> None:
    """The one that has waited longest without a request gives way; with all of them busy the new one gets 503."""
    async with farm.client() as first, farm.client() as second:
        await second.send(b"GET /slow HTTP/1.1\r\n\r\n")
        while not farm.asked:
            await asyncio.sleep(0)
        clients = [await asyncio.open_connection("127.0.0.1", farm.port) for _ in range(7)]
        assert await first.ended() == b""
        for _, writer in clients:
            writer.write(b"GET /slow HTTP/1.1\r\n\r\n")
        while farm.asked < 8:
            await asyncio.sleep(0)
        async with farm.client() as late:
            assert (await late.refusal())[:2] == (503, "too_many_connections")
        farm.release.set()
        assert await second.answer() == (200, b"0")
        for _, writer in clients:
            writer.close()


async def test_partial_heads_beyond_their_memory_close_the_oldest(farm: Farm) -> None:
    """The oldest closes where all together take too much; one without a byte of a head is left alone."""
    async with farm.client() as idle, farm.client() as first:
        await first.send(HEAD + b"x: " + b"a" * 3000)
        while not farm.config.waiting.held_bytes:
            await asyncio.sleep(0)
        async with farm.client() as second, farm.client() as third:
            for client in (second, third):
                await client.send(HEAD + b"x: " + b"a" * 3000)
            assert await first.ended() == b""
            await third.send(b"\r\ncontent-length: 0\r\n\r\n")
            assert await third.answer() == (200, b"0")
            await idle.send(HEAD + b"content-length: 1\r\n\r\na")
            assert await idle.answer() == (200, b"1")


async def test_five_pipelined_requests_are_answered_in_order(farm: Farm) -> None:
    """Five are answered in order, what comes after them is not; the connection ends."""
    async with farm.client() as client:
        await client.send((HEAD + b"content-length: 1\r\n\r\na") * 1000)
        assert [await client.answer() for _ in range(5)] == [(200, b"1")] * 5
        assert await client.ended() == b""
        assert farm.asked == 5


async def test_a_client_that_leaves_behind_a_pipelined_request(farm: Farm) -> None:
    """The request that is answered is told, although another one waits behind it."""
    async with farm.client() as client:
        await client.send(b"GET /slow HTTP/1.1\r\n\r\nGET /slow HTTP/1.1\r\n\r\n")
        while not farm.asked:
            await asyncio.sleep(0)
    while not farm.left:
        await asyncio.sleep(0.001)
    assert farm.asked == 1


async def test_the_rest_of_a_body_that_nobody_reads(farm: Farm) -> None:
    """It may come, and the next request after it is answered; without an end the connection closes."""
    head = b"POST /unread HTTP/1.1\r\ncontent-length: 40000\r\n\r\n"
    async with farm.client() as client:
        await client.send(head + b"x")
        assert await client.answer() == (200, b"0")
        await client.send(b"x" * 39_999 + HEAD + b"content-length: 1\r\n\r\na")
        assert await client.answer() == (200, b"1")
    async with farm.client() as client:
        await client.send(b"POST /unread HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\nx")
        assert await client.answer() == (200, b"0")
        for _ in range(8):
            await client.send(b"x" * 40_000)
        assert await client.ended() == b""


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_an_upgrade_is_answered_as_a_request(farm: Farm, protocol: bytes) -> None:
    """As Java's client asks for it with its first request; the next one goes over the same connection."""
    asked = HEAD + b"connection: upgrade\r\nupgrade: " + protocol + b"\r\ncontent-length: 3\r\n\r\nabc"
    async with farm.client() as client:
        for _ in range(2):
            await client.send(asked)
            assert await client.answer() == (200, b"3")
        await client.send(asked + asked)
        assert [await client.answer() for _ in range(2)] == [(200, b"3")] * 2
