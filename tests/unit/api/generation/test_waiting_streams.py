"""A waiting stream writes places and keep-alives."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

import api.generation.session
from api.chat.tokens import Vocabulary
from api.generation.client_request import Caller
from api.generation.follow import Feed, Feeds
from api.generation.session import Session, ShutdownState, events, renderer_of
from api.observability import Metrics, RequestLog
from api.schemas.view import View
from api.settings import ApiSettings
from control.messages import LogEntry
from control.requests import QueuePlace
from tests.byte_model import byte_assets

VOCABULARY = Vocabulary(byte_assets())
VIEW = View(endpoint="chat", created=0, model="m", n=1, members=1)
CHANGES = 50


class _Follower:
    def open(self, model: str, rid: str, tenant: str, wake: asyncio.Event) -> Feed:
        return Feed(model, rid, tenant, wake, 0.0)

    def leave(self, *_: Any) -> None:
        """Nothing follows it."""


class WaitingStream:
    """A stream whose request waits, and the bytes that it has written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        nothing: Any = None
        feeds = Feeds(cast(Any, _Follower()), "m", "t", "r")
        self.feed = feeds.open("r")
        self.session = Session(
            feeds=feeds,
            renderer=renderer_of("r", VIEW, VOCABULARY, 3),
            caller=Caller(request_log=RequestLog(Metrics(), path="/", client_request_id=None)),
            settings=ApiSettings(redis_url="redis://none"),
            shutdown=ShutdownState(),
            complete=nothing,
            load_stage=lambda: None,
        )

    async def read(self) -> None:
        async for data in events(self.session):
            self.written.append(data)

    async def turn(self) -> None:
        """Whatever was set off happens."""
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def comments(self) -> list[bytes]:
        return [data for data in self.written if data.startswith(b": ")]


@pytest.mark.parametrize(("every_s", "comments"), [(5.0, 1), (0.0, CHANGES)], ids=["bounded", "control"])
async def test_places_that_change_quickly_are_not_all_written(
    every_s: float, comments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of fifty changes at once the first is written; without the bound each one is. The claim is told at once."""
    monkeypatch.setattr(api.generation.session, "PLACE_EVERY_S", every_s)
    stream = WaitingStream()
    reading = asyncio.create_task(stream.read())
    for position in range(CHANGES, 0, -1):
        await stream.turn()
        stream.feed.placed(QueuePlace(position, 4.2), asyncio.get_running_loop().time())
    await stream.turn()
    assert len(stream.comments) == comments
    assert stream.comments[0] == b": queue position 50, expected wait 4200 ms\n"
    stream.feed.position = None
    stream.feed.wake.set()
    await stream.turn()
    assert stream.comments[comments:] == [b": claimed\n"]
    stream.feed.offer([LogEntry(1, 0, 65, "stop")], 0.0)
    await reading
    assert stream.written[-1].endswith(b"data: [DONE]\n\n")
