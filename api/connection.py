"""One client's connection: a reader that stalls is cut, so that it holds neither memory nor a worker for ever."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any, cast

import structlog
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = structlog.stdlib.get_logger(__name__)

STALLED = "furrow.stalled"
"""Key of the request's scope, set when its connection was cut for this reason."""


class ServerConfig(uvicorn.Config):
    """Uvicorn's settings, how long a reader may stall, in seconds, and whether the process is about to end."""

    def __init__(
        self, app: Any, *, reader_timeout: float, draining: Callable[[], bool] = lambda: False, **options: Any
    ) -> None:
        super().__init__(app, http=ClientConnection, **options)
        self.reader_timeout, self.draining = reader_timeout, draining


class ClientConnection(HttpToolsProtocol):
    """Cuts a client that takes nothing for `reader_timeout` seconds while data waits for it.

    What waits is bounded meanwhile: the transport's buffer is above its mark (64 KiB), so the stream's generator rests.
    """

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

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if cast(ServerConfig, self.config).draining():
            self.close_after_answer()

    def close_after_answer(self) -> None:
        """Tell the client, where the answer has not begun: kept alive, it would come to a process that has ended."""
        if self.cycle is not None:  # pyright: ignore[reportUnnecessaryComparison] (before the first request it is)
            self.cycle.keep_alive = False

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

    def abort(self) -> None:
        """End the connection at once; what waits in its buffer is dropped."""
        self.transport.abort()

    @property
    def _patience(self) -> float:
        return cast(ServerConfig, self.config).reader_timeout

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
            cycle.scope[STALLED] = True

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
