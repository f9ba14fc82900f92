"""The chaos client resumes or says why not: against a server that cuts, refuses and falls silent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ops.chaos.load import Attempt, Question, stream
from ops.harness.client import Base

QUESTION = Question("q", b'{"stream":true}')
WORDS = ["One", " two", " three"]


@dataclass
class Api:
    """Serves the stream of three tokens after what Last-Event-ID names; the n-th connection ends as `ends` says."""

    ends: list[str]
    seen: list[dict[str, str]] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:]
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        await reader.readexactly(int(headers["content-length"]))
        self.seen.append(headers)
        end = self.ends[len(self.seen) - 1] if len(self.seen) <= len(self.ends) else "done"
        if end.isdigit() and len(end) == 3:
            writer.write(f"HTTP/1.1 {end} Refused\r\ncontent-length: 2\r\n\r\n{{}}".encode())
        else:
            self._stream(writer, headers, end)
        writer.close()

    def _stream(self, writer: asyncio.StreamWriter, headers: dict[str, str], end: str) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        had = int(headers.get("last-event-id", "rid:0.1").partition(":")[2].partition(".")[0])
        for seq in range(had + 1, len(WORDS) + 1):
            chunk(writer, f'id: rid:{seq}.1\ndata: {{"choices":[{{"delta":{{"content":"{WORDS[seq - 1]}"}}}}]}}\n\n')
            if end == f"cut after {seq}":
                return
        if end == "error":
            chunk(writer, 'id: rid:3.3\ndata: {"error":{"message":"gone","code":"generation_failed"}}\n\n')
        chunk(writer, "id: rid:3.4\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def chunk(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())


@asynccontextmanager
async def listening(serve: Callable[..., Awaitable[None]]) -> AsyncIterator[Base]:
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield Base("127.0.0.1", server.sockets[0].getsockname()[1])


async def asked(*ends: str) -> tuple[Attempt, list[dict[str, str]]]:
    """The attempt of one client at one API, and the headers of each of its connections."""
    api = Api(list(ends))
    async with listening(api.serve) as base:
        return await stream([base], QUESTION, random.Random(1)), api.seen


async def test_a_cut_stream_is_resumed_after_its_last_event() -> None:
    """Nothing is asked for twice, and the key stays the same."""
    attempt, seen = await asked("cut after 2")
    assert attempt.transcript.text == "One two three" and attempt.transcript.done
    assert [headers.get("last-event-id") for headers in seen] == [None, "rid:2.1"]
    assert len({headers["idempotency-key"] for headers in seen}) == 1
    assert [place.seq for place in attempt.transcript.places] == [1, 2, 3, 3]
    assert len(attempt.connected) == 2 and len(attempt.heard) == 4


async def test_a_refusal_that_may_pass_is_tried_again() -> None:
    """503 is what an API says while Redis is away."""
    attempt, seen = await asked("503", "503")
    assert attempt.transcript.done and not attempt.transcript.errors and len(seen) == 3
    assert attempt.refusals == {"refused: 503 {}": 2}


async def test_a_refusal_for_good_ends_the_attempt() -> None:
    """A request that is not known any more is lost: that is a finding."""
    attempt, _ = await asked("cut after 1", "404")
    assert attempt.transcript.errors == ["refused: 404 {}"] and not attempt.transcript.done


async def test_an_error_event_ends_the_attempt() -> None:
    """The farm gave the request up."""
    attempt, _ = await asked("error")
    assert attempt.transcript.errors == ["an error event: generation_failed: gone"]


async def test_a_dead_api_is_left_for_the_other() -> None:
    """If an address refuses connections, the next connection goes to another one."""
    api = Api([])
    async with listening(api.serve) as base:
        async with listening(api.serve) as dead:
            pass
        attempts = [await stream([base, dead], QUESTION, random.Random(seed)) for seed in range(8)]
    assert all(attempt.transcript.done for attempt in attempts)
    assert any(attempt.refusals == {"ConnectionRefusedError": 1} for attempt in attempts)
