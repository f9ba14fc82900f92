"""Tokens of a stream that waits are written without its task."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

import api.generation.follow
from api.chat.tokens import Vocabulary
from api.generation.client_request import Caller
from api.generation.follow import Feeds, Follower
from api.generation.session import Session, ShutdownState, events, renderer_of
from api.http.connection import Client
from api.observability import Metrics, RequestLog
from api.schemas.view import View
from api.settings import ApiSettings
from control.messages import EventRow, LogEntry
from tests.byte_model import byte_assets

VOCABULARY = Vocabulary(byte_assets())
VIEW = View(endpoint="chat", created=0, model="m", n=1, members=1)


class Body:
    """A connection to which parts can be written while it is `ready`."""

    def __init__(self, note: Callable[[bytes], object]) -> None:
        self.ready = True
        self.write = note


class DirectClient(Client):
    """The client of a connection with such a body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self._body = body

    def body_writer(self) -> Any:
        return self._body


class Stream:
    """A stream of one process, and who wrote each of its parts: its task, or the connection directly."""

    def __init__(self, follower: Follower, rid: str) -> None:
        self.rid = rid
        self.parts: list[tuple[str, bytes]] = []
        self.body = Body(lambda data: self.parts.append(("direct", data)))
        nothing: Any = None
        client = DirectClient(self.body)
        feeds = Feeds(follower, "m", "t", rid)
        feeds.open(rid)
        self.renderer = renderer_of(rid, VIEW, VOCABULARY, 3)
        self.session = Session(
            feeds=feeds,
            renderer=self.renderer,
            caller=Caller(request_log=RequestLog(Metrics(), path="/", client_request_id=None), client=client),
            settings=ApiSettings(redis_url="redis://none", keep_alive=0.3),
            shutdown=ShutdownState(),
            complete=nothing,
            load_stage=lambda: None,
        )
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for data in events(self.session):
            self.parts.append(("task", data))

    @property
    def ways(self) -> list[str]:
        return [way for way, _ in self.parts]

    @property
    def text(self) -> bytes:
        return b"".join(data for _, data in self.parts)


async def turn() -> None:
    """Whatever was set off happens."""
    for _ in range(4):
        await asyncio.sleep(0)


@pytest.fixture
async def follower(monkeypatch: pytest.MonkeyPatch) -> Follower:
    one = Follower(cast(Any, SimpleNamespace(pubsub=lambda: None)), cast(Any, None), ApiSettings(redis_url="redis://x"))
    monkeypatch.setattr(one, "leave", lambda *_: None)
    return one


def say(follower: Follower, seq: int, *streams: Stream, finish: Any = None) -> None:
    """A leader's message: token `seq` of each stream."""
    entry = LogEntry(seq, 0, 64 + seq, finish)
    follower._receive_event("m", [EventRow(stream.rid, [entry]) for stream in streams])  # pyright: ignore[reportPrivateUsage]


async def begun(follower: Follower, *rids: str) -> list[Stream]:
    """Streams that wait for their second token."""
    streams = [Stream(follower, rid) for rid in rids]
    await turn()
    say(follower, 1, *streams)
    await turn()
    assert all(stream.ways == ["task"] for stream in streams)
    return streams


async def test_tokens_are_written_without_the_task_of_their_stream(follower: Follower) -> None:
    """The first token and the end are the task's; the bytes are those that the task would have sent."""
    [one] = await begun(follower, "a")
    for seq in (2, 3):
        say(follower, seq, one)
        await turn()
    assert one.ways == ["task", "direct", "direct"]
    say(follower, 4, one, finish="length")
    await one.reading
    assert one.ways == ["task", "direct", "direct", "direct", "task"]
    other = Stream(follower, "a")
    other.body.ready = False
    await turn()
    for seq in (1, 2, 3):
        say(follower, seq, other)
        await turn()
    say(follower, 4, other, finish="length")
    await other.reading
    assert set(other.ways) == {"task"} and one.text == other.text


async def test_a_slow_client_is_left_to_the_task_of_its_stream(follower: Follower) -> None:
    """Nothing is written to a connection whose buffer is full, and the other stream goes on."""
    slow, fast = await begun(follower, "slow", "fast")
    slow.body.ready = False
    say(follower, 2, slow, fast)
    await turn()
    assert slow.ways == ["task", "task"] and fast.ways == ["task", "direct"]
    slow.body.ready = True
    say(follower, 3, slow)
    await turn()
    assert slow.ways == ["task", "task", "direct"]


async def test_messages_that_came_together_make_one_part(follower: Follower) -> None:
    """A process that falls behind writes fewer, larger parts."""
    [one] = await begun(follower, "a")
    for seq in (2, 3, 4):
        say(follower, seq, one)
    await turn()
    assert one.ways == ["task", "direct"] and one.text.count(b"\ndata: ") == 3 and b'"content":"cde"' in one.text


async def test_a_stream_that_fails_ends_with_its_error_alone(follower: Follower) -> None:
    """What fails in one stream reaches neither the reader of messages nor the other streams."""
    broken, whole = await begun(follower, "broken", "whole")

    def fail(*_: Any) -> bytes:
        raise ValueError("unrenderable")

    broken.renderer.feed = fail  # type: ignore[method-assign]
    say(follower, 2, broken, whole)
    await broken.reading
    assert b'"error"' in broken.text and b"[DONE]" in broken.text
    assert whole.ways == ["task", "direct"] and not whole.reading.done()


async def test_a_last_token_that_fails_is_no_silent_end(follower: Follower) -> None:
    """The answer has ended by then, and the client learns of the error all the same."""
    [one] = await begun(follower, "a")

    def fail(*_: Any) -> bytes:
        raise ValueError("unrenderable")

    one.renderer._writer.finish = fail  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    say(follower, 2, one, finish="length")
    await one.reading
    assert b'"error"' in one.text and b"[DONE]" in one.text


async def test_the_end_of_a_stream_frees_its_memory(follower: Follower) -> None:
    """Prompt and tokens don't wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        [one] = await begun(follower, "a")
        say(follower, 2, one)
        await turn()
        say(follower, 3, one, finish="length")
        await one.reading
        feeds = weakref.ref(one.session.feeds)
        one.session.feeds.leave()
        one.body.write = len  # instead of what knows the stream
        del one
        await turn()
        assert feeds() is None
    finally:
        gc.enable()


async def test_many_streams_are_written_in_several_turns_of_the_loop(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other work of the process comes between them."""
    monkeypatch.setattr(api.generation.follow, "_WRITES_AT_ONCE", 2)
    streams = await begun(follower, "a", "b", "c")
    say(follower, 2, *streams)
    written: list[int] = []
    for _ in range(4):
        await asyncio.sleep(0)
        written.append(sum(stream.ways.count("direct") for stream in streams))
    assert written[0] == 2 and written[-1] == 3


async def test_silence_is_counted_from_the_last_direct_part(follower: Follower) -> None:
    """No keep-alive comes while tokens do."""
    [one] = await begun(follower, "a")
    for seq in range(2, 8):
        await asyncio.sleep(0.1)
        say(follower, seq, one)
    await turn()
    assert b"keep-alive" not in one.text
    await asyncio.sleep(0.5)
    assert one.text.endswith(b": keep-alive\n")
