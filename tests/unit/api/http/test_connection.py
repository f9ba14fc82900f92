"""A connection that takes nothing is cut: after its time, and one that takes something is not, on any kernel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.server import ServerState

from api.http.connection import ClientConnection, ServerConfig


class StuckTransport(asyncio.Transport):
    """Holds `waiting` bytes, and tells when it is aborted."""

    def __init__(self, waiting: int) -> None:
        super().__init__()
        self.waiting = waiting
        self.aborted = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
async def connection() -> ClientConnection:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    config = ServerConfig(app, http=ClientConnection, reader_timeout=0.02, log_config=None)
    config.load()
    connection = ClientConnection(config, ServerState(), {})
    connection.connection_made(StuckTransport(100_000))
    return connection


def stuck(connection: ClientConnection) -> StuckTransport:
    assert isinstance(connection.transport, StuckTransport)
    return connection.transport


async def test_nothing_taken_is_the_end(connection: ClientConnection) -> None:
    """With the same bytes waiting after the time as before it, the connection is aborted."""
    connection.pause_writing()
    await asyncio.wait_for(stuck(connection).aborted.wait(), 5)


async def test_whoever_takes_something_gets_more_time(connection: ClientConnection) -> None:
    """Each look that finds fewer bytes than the last one begins the time anew; then nothing more is taken."""
    transport, looks = stuck(connection), list[int]()

    def shrinking() -> int:
        looks.append(transport.waiting)
        transport.waiting = max(70_000, transport.waiting - 5_000)
        return transport.waiting

    transport.get_write_buffer_size = shrinking  # type: ignore[method-assign]
    connection.pause_writing()
    await asyncio.wait_for(transport.aborted.wait(), 5)
    assert len(looks) >= 5 and transport.waiting == 70_000


async def test_whoever_reads_on_or_leaves_is_not_looked_at(connection: ClientConnection) -> None:
    """Once the buffer is low again, or the connection is gone, nobody is cut."""
    for calm in (connection.resume_writing, lambda: connection.connection_lost(ConnectionResetError())):
        connection.pause_writing()
        calm()
        await asyncio.sleep(0.05)  # longer than the time: there is nothing that would tell that nothing happened
        assert not stuck(connection).aborted.is_set()
