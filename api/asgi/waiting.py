"""Connections that have not sent the whole head of a request: which of them closes where too many are open."""

from __future__ import annotations

from typing import Protocol

import structlog

from api.asgi.limits import ConnectionLimits

log = structlog.stdlib.get_logger(__name__)


class Closable(Protocol):
    def abort(self) -> None: ...


class Waiting:
    """Every connection between requests, in the order in which they began to wait, and the bytes of partial heads."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all: dict[Closable, None] = {}
        self._partial: dict[Closable, int] = {}
        self.held_bytes = 0

    def enter(self, connection: Closable) -> None:
        """The connection waits for the first byte of a request."""
        self.leave(connection)
        self._all[connection] = None

    def hold(self, connection: Closable, size: int) -> None:
        """`size` bytes of an incomplete head are held; the oldest connection with a partial head may close."""
        self.held_bytes += size - self._partial.get(connection, 0)
        self._partial[connection] = size
        while self.held_bytes > self._limits.heads_bytes:
            oldest = next(iter(self._partial))
            self._close(oldest, "partial heads of requests take too much memory")

    def leave(self, connection: Closable) -> None:
        """The connection has sent a whole head, or is gone."""
        self._all.pop(connection, None)
        self.held_bytes -= self._partial.pop(connection, 0)

    def make_room(self, connections: int, newest: Closable) -> bool:
        """Close the connection that has waited longest where more than the limit are open. False: none waits."""
        if connections <= self._limits.connections:
            return True
        oldest = next(iter(self._all), newest)
        if oldest is newest:
            return False
        self._close(oldest, "too many connections are open")
        return True

    def _close(self, connection: Closable, why: str) -> None:
        self.leave(connection)
        log.info("a connection without a request is closed", action="close_waiting", why=why)
        connection.abort()
