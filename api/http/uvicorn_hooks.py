"""The parts of uvicorn that Furrow uses beyond its documented interface, in one place.

Uvicorn promises none of it: a new version may rename a method or an attribute, or call it at another moment. The test
of this module holds the names against the installed version, and fails for a version that is newer than NEWEST.
"""

from __future__ import annotations

from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["BodyWriter", "HttpConnection", "HttpServer", "RequestResponseCycle"]

NEWEST = (0, 54)
"""The newest version whose protocol, cycle and server were read, and with which all tests passed."""
CONNECTION_NAMES = [
    "app_state",
    "client",
    "connections",
    "cycle",
    "flow",
    "headers",
    "loop",
    "parser",
    "pipeline",
    "scope",
    "tasks",
    "transport",
    "on_body",
    "on_header",
    "on_headers_complete",
    "on_message_begin",
    "on_message_complete",
    "on_response_complete",
    "on_url",
    "shutdown",
    "_get_upgrade",
    "_should_upgrade",
    "_start_asgi_task",
    "_unset_keepalive_if_required",
]
"""Attributes and methods of a connection that are read, called or overridden; `url` comes with a request."""
CYCLE_NAMES = [
    "chunked_encoding",
    "disconnected",
    "flow",
    "keep_alive",
    "message_event",
    "response_complete",
    "response_started",
    "scope",
    "transport",
]
SERVER_NAMES = ["config", "lifespan", "main_loop", "on_tick", "server_state", "shutdown", "startup"]
SERVER_HOOK = "_wait_tasks_to_complete"


class HttpConnection(HttpToolsProtocol):
    """Uvicorn's connection by httptools; its private methods under names of our own."""

    def takes_upgrade(self) -> bool:
        """True if the request whose head is complete changes the connection's protocol."""
        return False

    def begin_answer(self, cycle: RequestResponseCycle) -> None:
        """A request is handed to the application."""

    def stop_idle_timer(self) -> None:
        """The connection does not wait for another request any more."""
        self._unset_keepalive_if_required()

    @property
    def upgrade_protocol(self) -> bytes | None:
        """The protocol that the request asks for in place of HTTP."""
        return self._get_upgrade()

    def _should_upgrade(self) -> bool:
        return self.takes_upgrade()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self.begin_answer(cycle)
        super()._start_asgi_task(cycle, app)


class BodyWriter:
    """Writes parts of an answer's body in chunks, as `send` of its cycle does, without a coroutine for each."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    @classmethod
    def of(cls, cycle: RequestResponseCycle) -> BodyWriter | None:
        """For an answer that has begun; None where its body is not sent in chunks, or not at all."""
        begun = cycle.response_started and not cycle.response_complete
        return cls(cycle) if begun and cycle.chunked_encoding else None

    @property
    def ready(self) -> bool:
        """True where `send` would not wait for the client to read, and the client is there."""
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write(self, part: bytes) -> None:
        """Send a part, which is not empty. Only while `ready`."""
        self._write(b"%x\r\n%b\r\n" % (len(part), part))


class HttpServer(uvicorn.Server):
    async def wait_for_tasks(self) -> None:
        """Until connections are closed and handlers have ended."""
        await self._wait_tasks_to_complete()
