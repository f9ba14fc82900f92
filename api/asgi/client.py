"""The client of one request, as its connection sees it: present or gone, and what it sent that nobody has read."""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from api.asgi.turns import Turn
from api.errors.errors import ClientDisconnected

_KEY = "furrow.client"
_ESTABLISHED = 1
"""TCP's state of a connection that neither side has closed (Linux, include/net/tcp_states.h)."""


@dataclass(eq=False, slots=True)
class UnreadBodies:
    """Bytes of bodies whose requests wait for their turn."""

    limit: int
    size: int = 0


@dataclass(eq=False, slots=True)
class Client:
    """One for each request, in its scope."""

    unread: UnreadBodies | None = None
    """Where the bytes of this body count; None once the request is handled."""
    unread_bytes: int = 0
    left: bool = False
    """True once the connection is gone before the end of the answer."""
    stalled: bool = False
    """True once the connection was cut because the client read nothing."""
    transport: asyncio.BaseTransport | None = None
    cycle: weakref.ref[RequestResponseCycle] | None = None
    """Uvicorn's handling of the request, which holds its scope, and so this client."""
    turn: Turn | None = None
    """The turn in which the request is admitted; None in a server without turns."""
    _on_leave: Callable[[], object] | None = None

    def gone(self) -> bool:
        """True if the client has left, also where the event loop has not come to it yet."""
        if not self.left and self.transport is not None and not self.transport.is_closing():
            connection = self.transport.get_extra_info("socket")
            if connection is not None and client_left(connection):
                self.leave()
        return self.left

    def receive(self, size: int) -> bool:
        """Count bytes of a body; False where requests that wait hold too many."""
        if self.unread is None:
            return True
        self.unread_bytes += size
        self.unread.size += size
        return self.unread.size <= self.unread.limit

    def begin(self) -> None:
        """The request is handled from now on, and its body is read."""
        if self.unread is not None:
            self.unread.size -= self.unread_bytes
            self.unread = None

    def leave(self) -> None:
        """Called where the connection is gone, or found to be."""
        self.left = True
        cycle = self.cycle() if self.cycle is not None else None
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()
        self.begin()
        if self._on_leave is not None:
            self._on_leave()

    @contextmanager
    def watched(self, wake: Callable[[], object]) -> Generator[None]:
        """Calls `wake` when the client leaves; at once where it has left."""
        self._on_leave = wake
        if self.left:
            wake()
        try:
            yield
        finally:
            self._on_leave = None

    async def turn_again(self) -> None:
        """Wait for the tenant's turn, where the first one ended because the body was waited for.

        Raises ClientDisconnected.
        """
        if self.turn is None:
            return
        try:
            await self.turn.again(self.watched)
        except asyncio.CancelledError:
            if self.left:
                raise ClientDisconnected from None
            raise

    def admitted(self) -> None:
        """The work of admission is done: what follows is not charged to it."""
        self.turn = None


def client_of(scope: Any) -> Client:
    """The client of a request; one that never leaves where the server tells nothing of it."""
    client = scope.get(_KEY)
    if client is None:
        client = scope[_KEY] = Client()
    return client


def set_client(scope: Any, client: Client) -> None:
    """Called by the connection, before the request is handled."""
    scope[_KEY] = client


def client_left(connection: socket.socket) -> bool:
    """True if the client has closed the connection; False where the system does not tell."""
    if not hasattr(socket, "TCP_INFO") or connection.family == socket.AF_UNIX:
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
    except OSError:
        return True
