"""Request bodies are bounded: each one's size and speed, each owner's share, and all together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.http.bodies import Bodies, BodyLimits, text_bytes
from api.http.errors import BodyTooSlow, ClientDisconnected, TooManyBodies
from control.errors import RequestError, RequestTooLarge

MOST = 1000
LIMITS = BodyLimits(text_bytes=10, memory_bytes=40, small_bytes=3, grace=5.0, bytes_per_second=1)
"""Each share is 10 bytes."""


class Sent:
    """A request whose chunks come as they are pushed; None ends the body, "gone" the connection."""

    def __init__(self, *chunks: Any, **headers: str) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self._queue = asyncio.Queue[Any]()
        for chunk in chunks:
            self.push(chunk)

    def push(self, chunk: Any) -> None:
        self._queue.put_nowait(chunk)

    async def receive(self) -> dict[str, Any]:
        chunk = await self._queue.get()
        if chunk == "gone":
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}


async def read(bodies: Bodies, sent: Any, owner: str = "", most: int = MOST) -> bytes:
    async with bodies.reading(sent, most, owner) as body:
        return body


async def reads(bodies: Bodies, sent: Sent, held: int, owner: str = "") -> asyncio.Task[bytes]:
    """A task that reads, once so many bytes are held."""
    task = asyncio.ensure_future(read(bodies, sent, owner))
    while bodies.held_bytes != held:
        await asyncio.sleep(0)
    return task


async def test_a_body_counts_until_its_request_is_queued() -> None:
    bodies = Bodies(LIMITS)
    async with bodies.reading(Sent(b"12345", b"678", None), MOST, "") as body:  # type: ignore[arg-type]
        assert (body, bodies.held_bytes) == (b"12345678", 8)
    assert bodies.held_bytes == 0


async def test_what_is_queued_soon_does_not_give_way() -> None:
    """Its share is full: another body of its owner is refused, another owner's is read, and so is a small one."""
    bodies = Bodies(LIMITS)
    async with bodies.reading(Sent(b"12345678", None), MOST, ""):  # type: ignore[arg-type]
        with pytest.raises(TooManyBodies, match="Retry"):
            await read(bodies, Sent(b"1234", None))
        assert await read(bodies, Sent(b"1234567890", None), owner="tenant") == b"1234567890"
        assert await read(bodies, Sent(b"123", None)) == b"123"
        assert bodies.held_bytes == 8


async def test_the_largest_upload_gives_way() -> None:
    """A stalled upload keeps nobody out: it is refused as soon as a smaller one needs its memory."""
    bodies = Bodies(LIMITS)
    stalled = await reads(bodies, Sent(b"1234567"), 7)
    assert await read(bodies, Sent(b"12345", None)) == b"12345"
    with pytest.raises(TooManyBodies, match="Retry"):
        await stalled
    smaller = await reads(bodies, Sent(b"1234"), 4)
    with pytest.raises(TooManyBodies):
        await read(bodies, Sent(b"1234567", None))
    smaller.cancel()
    await asyncio.wait([smaller])
    assert bodies.held_bytes == 0


async def test_all_shares_together_are_bounded() -> None:
    """The owner who holds most gives way."""
    bodies = Bodies(LIMITS)
    stalled = [await reads(bodies, Sent(b"1" * 9), 9 * (n + 1), f"tenant {n}") for n in range(4)]
    assert await read(bodies, Sent(b"12345", None), "another") == b"12345"
    done, _ = await asyncio.wait(stalled, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    for task in stalled:
        task.cancel()
    await asyncio.wait(stalled)
    assert bodies.held_bytes == 0


async def test_a_body_that_is_too_large() -> None:
    """Refused before a byte of it is read where its length is told, and at the first byte beyond the limit else."""
    for sent in (Sent(content_length="1001"), Sent(b"x" * 600, b"x" * 401)):
        with pytest.raises(RequestTooLarge, match="too large"):
            await read(Bodies(BodyLimits()), sent)
    assert await read(Bodies(BodyLimits()), Sent(b"x" * 1000, None, content_length="nonsense")) == b"x" * 1000


@pytest.mark.parametrize("size", [0, 20, 500])
async def test_a_body_that_stalls(size: int) -> None:
    """It has its grace, however much of it has come before."""
    bodies, loop = Bodies(BodyLimits(grace=0.05, bytes_per_second=100)), asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(BodyTooSlow, match=f"{size} bytes"):
        await read(bodies, Sent(b"x" * size))
    assert 0.05 <= loop.time() - began < 4
    assert bodies.held_bytes == 0


async def test_a_slow_body_that_comes_fast_enough() -> None:
    """It may take many times its grace."""
    sent = Sent()
    reading = asyncio.ensure_future(read(Bodies(BodyLimits(grace=0.5, bytes_per_second=10)), sent))
    for _ in range(15):
        await asyncio.sleep(0.1)
        sent.push(b"x" * 10)
    sent.push(None)
    assert len(await reading) == 150


async def test_a_client_that_leaves() -> None:
    bodies = Bodies(LIMITS)
    with pytest.raises(ClientDisconnected):
        await read(bodies, Sent(b"1", "gone"))
    assert bodies.held_bytes == 0


async def test_a_compressed_body_is_refused() -> None:
    with pytest.raises(RequestError, match="gzip"):
        await read(Bodies(LIMITS), Sent(b"1", None, content_encoding="gzip"))


async def test_a_body_with_too_many_values() -> None:
    """Refused while it comes, in whatever chunks; a text of the same size is read."""
    most = 4 << 20
    body = b"[1]," * (1 << 18)
    with pytest.raises(RequestError, match="too many values"):
        await read(
            Bodies(BodyLimits()), Sent(*(body[i : i + 1000] for i in range(0, len(body), 1000)), None), most=most
        )
    text = b'"' + body + b'"'
    assert await read(Bodies(BodyLimits()), Sent(text, None), most=most) == text


def test_the_size_of_a_text() -> None:
    """A few MiB for most models; a long run of one character is not counted for every token."""
    assert text_bytes(4096, 16) == text_bytes(32_768, 64) == 4 << 20
    assert text_bytes(131_072, 128) == 5 << 20
