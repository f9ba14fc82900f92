"""One client's connection: a reader that stalls is cut, so that it holds neither memory nor a worker for ever."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import Any

import structlog

from api.asgi.client import client_of
from api.asgi.heads import BoundedConnection

log = structlog.stdlib.get_logger(__name__)


class ClientConnection(BoundedConnection):
    """Cuts a client that takes nothing for `reader_timeout` seconds while data waits in the transport's buffer."""

    _looking: asyncio.TimerHandle | None = None
    _left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        sock: socket.socket | None = transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Linux counts from the first byte that the client leaves in the kernel, which this process does not see;
            # it finds a host that vanished, too. Elsewhere the count below begins when the kernel takes no more.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._patience * 1000))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_looking()
        if isinstance(exc, OSError) and exc.errno == errno.ETIMEDOUT:
            self._stalled()
        super().connection_lost(exc)

    @property
    def _patience(self) -> float:
        return self.config.reader_timeout

    def _look(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self._looking = self.loop.call_later(self._patience, self._judge)

    def _judge(self) -> None:
        if self.transport.get_write_buffer_size() < self._left:
            self._look()  # slow, but it reads
            return
        self._stalled()
        self.abort()

    def _stalled(self) -> None:
        log.warning(
            "a client takes nothing and is cut", action="cut_reader", client=self.client, waiting_bytes=self._left
        )
        cycle: Any = self.cycle
        if cycle is not None:
            client_of(cycle.scope).stalled = True

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
