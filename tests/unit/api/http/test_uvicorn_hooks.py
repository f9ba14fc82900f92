"""The installed uvicorn has what is taken of it beyond its interface."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.http.uvicorn_hooks import (
    CONNECTION_NAMES,
    CYCLE_NAMES,
    NEWEST,
    SERVER_HOOK,
    SERVER_NAMES,
    BodyWriter,
    HttpConnection,
)


async def app(scope: Any, receive: Any, send: Any) -> None: ...


CONFIG = uvicorn.Config(app, log_config=None)


def test_no_newer_version_is_installed() -> None:
    """Its protocol, cycle and server are to be read first; then NEWEST names it."""
    version = tuple(int(part) for part in uvicorn.__version__.split(".")[:2])
    assert version <= NEWEST, f"read uvicorn {uvicorn.__version__}, run all tests of api, and set NEWEST"


async def test_a_connection_has_all_names() -> None:
    """Attributes as they are before the first request."""
    connection = HttpToolsProtocol(CONFIG, ServerState(), {}, asyncio.get_running_loop())
    assert not [name for name in CONNECTION_NAMES if not hasattr(connection, name)]


def test_a_cycle_has_all_names() -> None:
    """What a connection reads and sets of the handling of a request."""
    parameters: dict[str, Any] = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    cycle = RequestResponseCycle(**parameters | {"scope": {"headers": []}, "keep_alive": True})
    assert not [name for name in CYCLE_NAMES if not hasattr(cycle, name)]


def test_a_server_has_all_names() -> None:
    """The lifespan is there once the server was started."""
    server: Any = uvicorn.Server(CONFIG)
    server.lifespan = None
    assert not [name for name in [*SERVER_NAMES, SERVER_HOOK] if not hasattr(server, name)]
    assert inspect.iscoroutinefunction(getattr(server, SERVER_HOOK))


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (HttpToolsProtocol._start_asgi_task, ["cycle", "app"]),  # pyright: ignore[reportPrivateUsage]
        (HttpToolsProtocol._should_upgrade, []),  # pyright: ignore[reportPrivateUsage]
        (FlowControl.pause_reading, []),
        (FlowControl.resume_reading, []),
    ],
)
def test_overridden_methods_take_what_is_passed_on(method: Callable[..., Any], names: list[str]) -> None:
    """Their parameters, besides self."""
    assert list(inspect.signature(method).parameters)[1:] == names


def test_an_answer_begins_where_its_task_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is called before uvicorn starts the handler."""
    order: list[str] = []
    monkeypatch.setattr(HttpToolsProtocol, "_start_asgi_task", lambda *_: order.append("started"))
    monkeypatch.setattr(HttpConnection, "begin_answer", lambda *_: order.append("begins"))
    connection: Any = object.__new__(HttpConnection)
    connection._start_asgi_task(None, None)
    assert order == ["begins", "started"]


class Transport:
    """Notes what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.write = self.written.append


async def begun_cycle(
    headers: list[tuple[bytes, bytes]], method: str = "POST"
) -> tuple[RequestResponseCycle, Transport]:
    """A request whose answer has begun with these headers."""
    transport: Any = Transport()
    parameters: dict[str, Any] = dict.fromkeys(inspect.signature(RequestResponseCycle).parameters)
    parameters["scope"] = {"headers": [], "method": method}
    parameters["transport"] = transport
    parameters["flow"] = FlowControl(transport)
    parameters["default_headers"] = list[tuple[bytes, bytes]]()
    parameters["keep_alive"] = True
    cycle = RequestResponseCycle(**parameters)
    await cycle.send(cast(Any, {"type": "http.response.start", "status": 200, "headers": headers}))
    transport.written.clear()
    return cycle, transport


async def test_a_direct_part_is_the_same_bytes_as_a_sent_one() -> None:
    """A chunk of the body."""
    cycle, transport = await begun_cycle([])
    part = b"data: x" * 40
    writer = BodyWriter.of(cycle)
    assert writer is not None and writer.ready
    await cycle.send({"type": "http.response.body", "body": part, "more_body": True})
    writer.write(part)
    assert len(transport.written) == 2 and transport.written[0] == transport.written[1]


async def test_a_direct_writer_is_not_ready_where_sending_would_wait() -> None:
    """The transport's buffer is full, or the client is gone."""
    cycle, _ = await begun_cycle([])
    writer = BodyWriter.of(cycle)
    assert writer is not None
    cycle.flow.pause_writing()
    assert not writer.ready
    cycle.flow.resume_writing()
    assert writer.ready
    cycle.disconnected = True
    assert not writer.ready


@pytest.mark.parametrize(("headers", "method"), [([(b"content-length", b"7")], "POST"), ([], "HEAD")])
async def test_only_a_body_in_chunks_is_written_directly(headers: list[tuple[bytes, bytes]], method: str) -> None:
    """One of a known length is not, nor one that is not sent."""
    cycle, _ = await begun_cycle(headers, method)
    assert BodyWriter.of(cycle) is None
