"""The web server's life: serving, draining after a signal, and the end of what outlives the grace."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any, cast

import structlog

from api.garbage import GarbageCollection
from api.http.connection import Acceptor, ClientConnection, ServerConfig
from api.http.middleware import answering_head, with_any_prefix
from api.http.uvicorn_hooks import HttpServer
from api.process import Process
from api.routes.response_socket import ResponseSockets

log = structlog.stdlib.get_logger(__name__)

_TICK_S = 0.1
_TICKS_OF_COLLECTION = 50
"""Ticks between two looks at the garbage."""
_FAREWELL_S = 2.0
"""Seconds that interrupted streams have to send their last event."""


class Server(HttpServer):
    """Uvicorn that listens while it drains, so that new requests get 503.

    Requests that run continue for the grace. Then, or at a second signal, every stream gets an event that it is
    interrupted. Connections that do not take even that are cut.
    """

    def __init__(self, app: Any, process: Process) -> None:
        settings = process.settings
        served = answering_head(with_any_prefix(process.admission.in_turn(app, process.gate.turns_of)))
        config = ServerConfig(
            served,
            http=ClientConnection,
            limits=settings.connection_limits,
            reader_timeout=settings.reader_timeout,
            draining=lambda: process.shutdown.draining,
            sockets=ResponseSockets(served, process),
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            log_config=None,
            access_log=False,
            lifespan="on",
            # For bytes of ended answers that are still on their way: no handler runs any more by then.
            timeout_graceful_shutdown=max(1, round(settings.grace)),
        )
        super().__init__(config)
        self._process = process
        self.garbage_collection = GarbageCollection()
        self._until: float | None = None
        self._hurry = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with acceptors in place of the event loop's servers."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        settings = self._process.settings
        if settings.ollama_port is not None:
            self.servers.append(cast(Any, await self._second_listener(settings.host, settings.ollama_port)))
        acceptors: list[Any] = []
        for server in self.servers:
            acceptors += Acceptor.instead_of(server, self._connection)
        self.servers = acceptors

    async def _second_listener(self, host: str, port: int) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        try:
            return await loop.create_server(self._connection, host, port, backlog=self.config.backlog)
        except OSError as error:
            log.error("can't listen on --ollama-port", action="listen", host=host, port=port, error=str(error))
            await self.lifespan.shutdown()
            sys.exit(1)

    def _connection(self) -> asyncio.Protocol:
        return ClientConnection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # In a signal handler nothing but flags is safe; the next tick, which comes at once, acts on them.
        self._hurry = self._process.shutdown.draining
        self._process.shutdown.draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._signalled.set)

    async def main_loop(self) -> None:
        """As uvicorn's, whose next tick comes up to 0.1 s after a signal."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._signalled.wait()
            self._signalled.clear()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which waits for 0.1 s before it looks whether anything runs."""
        for server in self.servers:
            server.close()
        for connection in self._connections:
            connection.shutdown()
        await asyncio.sleep(0)  # connections that wait for a request close
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                await self.wait_for_tasks()
        except TimeoutError:
            log.error("cancelling what still runs", action="stop", running=len(self.server_state.tasks))
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()

    async def on_tick(self, counter: int) -> bool:
        if self._process.shutdown.draining:
            self._drain(time.monotonic())
        elif counter % _TICKS_OF_COLLECTION == 0:
            self.garbage_collection.full_if_due(idle=not self.server_state.tasks)
        return await super().on_tick(counter)

    @property
    def _connections(self) -> list[ClientConnection]:
        return [cast(ClientConnection, connection) for connection in self.server_state.connections]

    def _drain(self, now: float) -> None:
        process = self._process
        running = len(self.server_state.tasks)
        if self._until is None:
            self._until = now + process.settings.grace
            for connection in self._connections:
                connection.close_after_answer()
            log.info("draining", action="drain", running=running, grace_s=process.settings.grace)
        if not running:
            self.should_exit = True
        elif not process.shutdown.interrupted and (self._hurry or now >= self._until):
            log.warning("interrupting what still runs", action="interrupt", running=running)
            process.interrupt()
            self._until = now + _FAREWELL_S
        elif process.shutdown.interrupted and now >= self._until:
            for connection in self._connections:
                connection.abort()
            self.should_exit = True
