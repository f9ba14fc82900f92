"""A stop of the API's server waits only for what runs."""

from __future__ import annotations

import asyncio
import signal
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from api import server as server_module
from api.generation.session import ShutdownState
from api.server import Server
from api.settings import ApiSettings


async def app(_scope: Any, _receive: Any, _send: Any) -> None:
    raise AssertionError("nobody asks")


async def nothing() -> None:
    pass


def idle_server() -> Server:
    """One that has started, with no listener and no connection."""
    process = SimpleNamespace(
        settings=ApiSettings(redis_url="redis://none"),
        shutdown=ShutdownState(),
        admission=SimpleNamespace(in_turn=lambda wrapped, _turns: wrapped),
        gate=SimpleNamespace(turns_of=None),
    )
    server = Server(app, cast(Any, process))
    server.config.load()
    server.lifespan = cast(Any, SimpleNamespace(startup=nothing, shutdown=nothing, should_exit=False, state={}))
    server.servers = []
    return server


async def test_a_signal_ends_the_wait_for_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_TICK_S", 60.0)
    server = idle_server()
    server.config.port = 0
    await server.startup()
    serving = asyncio.create_task(server.main_loop())
    await asyncio.sleep(0.05)
    server.handle_exit(signal.SIGTERM, None)
    await asyncio.wait_for(serving, 20)
    await server.shutdown()


async def test_without_connections_and_tasks_a_stop_takes_no_time() -> None:
    seconds: list[float] = []
    for _ in range(5):
        server = idle_server()
        begun = time.monotonic()
        await server.shutdown()
        seconds.append(time.monotonic() - begun)
    assert min(seconds) < 0.05
