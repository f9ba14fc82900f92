"""One connection through the lossy proxy: two ends, and what happens to the bytes between them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ops.chaos.system.proxy import Counts

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: closing sends a reset and throws away what was not sent."""

Connect = Callable[[asyncio.Protocol], Awaitable[None]]


class Lossy:
    """The state of the proxy that links read and write, in the proxy's loop only."""

    counts: Counts

    def __init__(self) -> None:
        self.to_drop = self.to_split = 0
        self.drop_ending = "cut"
        self.delay_s = 0.0
        self.black = False

    def forget(self, link: Link) -> None:
        """Both ends of `link` are closed."""
        raise NotImplementedError


class End(asyncio.Protocol):
    """One end of a link. Bytes that can't be written yet pause the reading at the other end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.transport: asyncio.Transport | None = None
        self.other: End | None = None
        self._waiting: list[bytes] = []
        self._late_until = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        for chunk in self._waiting:
            self.transport.write(chunk)
        self._waiting.clear()
        self._link.made(self)

    def data_received(self, data: bytes) -> None:
        self._link.received(self, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._link.lost(self)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def send(self, data: bytes, late_s: float) -> bool:
        """Write now, or `late_s` later but never before what was sent earlier; True if it is late."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        due = now + late_s
        if due <= self._late_until:
            due = self._late_until + 1e-6
        if due <= now:
            self._write(data)
            return False
        self._late_until = due
        loop.call_at(due, self._write, data)
        return True

    def _write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)
        elif self._link.open:
            self._waiting.append(data)

    def abort(self) -> None:
        """Close with a reset."""
        if self.transport is not None:
            end = self.transport.get_extra_info("socket")
            if end is not None and end.family != socket.AF_UNIX:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.transport.abort()


class Link:
    """A client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Lossy, connect: Connect) -> None:
        self._proxy, self._connect = proxy, connect
        self.client, self.server = End(self), End(self)
        self.client.other, self.server.other = self.server, self.client
        self._silent = proxy.black
        self._asked_script = False
        self._connecting: asyncio.Task[None] | None = None
        self.open = True

    @property
    def alive(self) -> bool:
        """True if bytes pass."""
        return self.open and not self._silent

    def made(self, end: End) -> None:
        """The client is there: go on to the server, unless all of this is to lead nowhere."""
        if end is self.client and not self._silent:
            self._connecting = asyncio.create_task(self._reach())
        elif end is self.server and (self._silent or not self.open):
            end.abort()

    async def _reach(self) -> None:
        try:
            await self._connect(self.server)
        except OSError:
            self.cut()

    def received(self, end: End, data: bytes) -> None:
        """Forward, or do what a fault asks."""
        if self._silent:
            self._proxy.counts.swallowed += len(data)
        elif end is self.client:
            self._asked_script = self._asked_script or b"EVAL" in data
            self._forward(self.server, data)
        else:
            self._answer(data)

    def _answer(self, data: bytes) -> None:
        proxy = self._proxy
        # An error may mean that nothing was executed; only an answer to a script counts as a loss.
        executed = self._asked_script and not data.startswith(b"-")
        self._asked_script = False
        if executed and proxy.to_drop > 0:
            proxy.to_drop -= 1
            proxy.counts.dropped += 1
            if proxy.drop_ending == "cut":
                self.cut()
            else:
                self.silence()
        elif executed and proxy.to_split > 0 and self.client.transport is not None:
            proxy.to_split -= 1
            proxy.counts.split += 1
            self.client.transport.write(data[: max(1, len(data) // 2)])
            self._end_after_sending()
        else:
            self._forward(self.client, data)

    def _end_after_sending(self) -> None:
        """The half must arrive, so no reset at the client's end: the stream just ends in the middle of an answer."""
        self.open = False
        self.server.abort()
        if self.client.transport is not None:
            self.client.transport.close()

    def _forward(self, to: End, data: bytes) -> None:
        if to.send(data, self._proxy.delay_s):
            self._proxy.counts.delayed += 1

    def lost(self, end: End) -> None:
        """One end closed: so does the other, unless nobody may hear of it."""
        if self._silent and end is self.server:
            return
        if self._silent and self.open:
            self._proxy.counts.abandoned += 1
        self.open = False
        other = end.other
        if other is not None and other.transport is not None:
            other.transport.close()
        else:
            self._proxy.forget(self)

    def cut(self) -> None:
        """Reset both ends."""
        self.open = False
        self.server.abort()
        self.client.abort()
        if self.client.transport is None:
            self._proxy.forget(self)

    def silence(self) -> None:
        """Carry nothing any more, and don't say so. The server's end is closed: there the client has vanished."""
        self._silent = True
        self.server.abort()
