"""Accepting connections: all that wait in each iteration of the event loop, and none whose client has left again.

uvloop accepts one connection an iteration, so that a new one waits for as many iterations as connections came before
it. Clients that connect and leave fill the kernel's queue, which then drops the first packets of others: these come
again after a second. Here a connection whose client left while it waited is closed before anything is made for it, and
the addresses from which connections come take turns.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import OrderedDict, deque
from collections.abc import Callable

import structlog

from api.asgi.client import client_left

log = structlog.stdlib.get_logger(__name__)

_AT_ONCE = 4
"""Connections that are handed over in one iteration of the event loop; each takes 0.3 ms of it, then or soon after."""
_ACCEPTED_AT_ONCE = 128
"""Connections that are taken from the kernel in one iteration; each takes about 0.02 ms."""
_MOST_WAITING = 4096
"""Accepted connections that are not handed over yet; further ones wait in the kernel's queue."""
_AGAIN_S = 0.5
"""After accepting failed, because there are too many open files for example."""


class Acceptor:
    """Accepts the connections of one listening socket. It takes the place of an asyncio server."""

    def __init__(self, listening: socket.socket, protocol_factory: Callable[[], asyncio.Protocol]) -> None:
        """`listening` must not block; it is closed by `close`."""
        self._listening, self._protocol_factory = listening, protocol_factory
        self._loop = asyncio.get_running_loop()
        self._accepted = OrderedDict[str, deque[socket.socket]]()
        """By the client's address; the address whose turn is next is the first."""
        self._waiting = 0
        """Connections in these queues."""
        self._making = set[asyncio.Task[object]]()
        self._closed = False
        self._loop.add_reader(listening, self._accept)

    @classmethod
    def instead_of(cls, server: asyncio.Server, protocol_factory: Callable[[], asyncio.Protocol]) -> list[Acceptor]:
        """Acceptors of the server's sockets; the server is closed, and no connection is lost."""
        listening = [socket.socket(fileno=os.dup(one.fileno())) for one in server.sockets]
        server.close()
        for one in listening:
            one.setblocking(False)
        return [cls(one, protocol_factory) for one in listening]

    def close(self) -> None:
        """Accept no more connections. Those that were accepted are handed over."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listening)
            self._listening.close()

    async def wait_closed(self) -> None:
        """As of an asyncio server."""

    def _accept(self) -> None:
        if not self._waiting:
            self._loop.call_soon(self._hand_over)
        for _ in range(min(_ACCEPTED_AT_ONCE, _MOST_WAITING - self._waiting)):
            try:
                connection, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("connections can't be accepted", action="accept", error=str(error))
                self._pause(_AGAIN_S)
                return
            self._accepted.setdefault(address_of(peer), deque()).append(connection)
            self._waiting += 1
        if self._waiting >= _MOST_WAITING:
            self._pause(0.0)

    def _next(self) -> socket.socket:
        """The oldest connection of the address whose turn it is."""
        address, connections = self._accepted.popitem(last=False)
        connection = connections.popleft()
        if connections:
            self._accepted[address] = connections
        self._waiting -= 1
        return connection

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._closed:
            return
        if self._waiting < _MOST_WAITING:
            self._loop.add_reader(self._listening, self._accept)
        else:
            self._loop.call_soon(self._resume)

    def _hand_over(self) -> None:
        places = _AT_ONCE
        while self._waiting and places:
            connection = self._next()
            if client_left(connection):
                connection.close()
                continue
            places -= 1
            task = self._loop.create_task(self._make(connection))
            self._making.add(task)
            task.add_done_callback(self._making.discard)
        if self._waiting:
            self._loop.call_soon(self._hand_over)

    async def _make(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol_factory, connection)
        except OSError:
            connection.close()  # the client left in this moment


def address_of(peer: object) -> str:
    """The client's address of a TCP connection; "" for a Unix socket."""
    return str(peer[0]) if isinstance(peer, tuple) else ""
