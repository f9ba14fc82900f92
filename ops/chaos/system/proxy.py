"""A lossy way to Redis: it forwards bytes, and on demand cuts, delays, swallows or stops them in the middle.

It runs in a thread of its own, so that a strike may wait while the farm's bytes still flow. It need not understand the
protocol: that something of a script's reply came back from the server is enough to know that the script was executed.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from ops.harness.farm import HOST

_ANSWER_WITHIN_S = 10.0
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of no seconds: closing sends a reset and throws away what was not sent."""

Connect = Callable[[asyncio.Protocol], Awaitable[None]]
Upstream = tuple[str, int] | Path
"""The server: host and port, or the path of its unix socket."""
Ending = Literal["cut", "silence"]

T = TypeVar("T")


@dataclass
class Counts:
    """Counters since the proxy's start: the proof that a fault took effect."""

    connections: int = 0
    cut: int = 0
    """Connections that were reset while they were open."""
    dropped: int = 0
    """Replies to scripts that the server had given and that never arrived."""
    split: int = 0
    """Replies of which only the first half arrived."""
    swallowed: int = 0
    """Bytes that vanished in a black hole."""
    abandoned: int = 0
    """Connections in a black hole that their client closed: it waited for an answer that never came."""
    delayed: int = 0
    """Chunks that were late."""


class Proxy:
    """One listener on loopback in front of one server. `start` and `stop` from any thread, faults from any other."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        # What links do to the bytes, read and written in the proxy's loop only.
        self.to_drop = self.to_split = 0
        self.drop_ending: Ending = "cut"
        self.delay_s = 0.0
        self.black = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lossy-proxy", daemon=True)
        self._server: asyncio.Server | None = None
        self._links: set[Link] = set()
        self._port = 0
        self.counts = Counts()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self._port}/0"

    def start(self) -> str:
        """Listen on a free port; returns the URL for everybody who shall be led through here."""
        self._thread.start()
        self._run(self._listen())
        return self.url

    def stop(self) -> None:
        """Cut everything and end the thread. Harmless when it is not running."""
        if not self._thread.is_alive():
            return
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_WITHIN_S)
        self._loop.close()

    # --- faults -----------------------------------------------------------------------------------------------------

    def cut(self, choose: Callable[[], bool] = lambda: True) -> int:
        """Reset every open connection for which `choose()` is true. Returns how many. They may come back at once."""

        def strike() -> int:
            links = [link for link in self._links if link.alive and choose()]
            for link in links:
                link.cut()
            self.counts.cut += len(links)
            return len(links)

        return self._in_loop(strike)

    def drop_replies(self, times: int, ending: Ending = "cut") -> None:
        """Let the next `times` scripts be executed and their answers never arrive.

        After it the connection is reset ("cut"), or says nothing any more until the client's time-out ("silence").
        """
        self._arm(to_drop=times, drop_ending=ending)

    def split_replies(self, times: int) -> None:
        """Deliver only the first half of the next `times` answers to scripts, then reset the connection."""
        self._arm(to_split=times)

    def delay(self, seconds: float) -> None:
        """From now on every chunk is late by so much, in both directions; 0 ends it."""
        self._arm(delay_s=seconds)

    def black_hole(self, choose: Callable[[], bool] = lambda: True, *, newcomers: bool = True) -> int:
        """Silence without a reset: open connections for which `choose()` is true never carry a byte again, and with
        `newcomers` new ones neither while it lasts. Returns how many were open."""

        def strike() -> int:
            self.black = newcomers
            links = [link for link in self._links if link.alive and choose()]
            for link in links:
                link.silence()
            return len(links)

        return self._in_loop(strike)

    def heal(self) -> None:
        """End what lasts. Connections that fell into a black hole stay there, as after a router forgot them."""
        self._arm(black=False, delay_s=0.0, to_drop=0, to_split=0)

    def _arm(self, **faults: Any) -> None:
        self._in_loop(lambda: self.__dict__.update(faults))

    # --- inside the thread ------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        def born() -> asyncio.Protocol:
            self.counts.connections += 1
            link = Link(self, self._connect)
            self._links.add(link)
            return link.client

        self._server = await self._loop.create_server(born, HOST, 0)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _connect(self, protocol: asyncio.Protocol) -> None:
        """Raises OSError while the server is away."""
        if isinstance(self._upstream, Path):
            await self._loop.create_unix_connection(lambda: protocol, str(self._upstream))
        else:
            await self._loop.create_connection(lambda: protocol, *self._upstream)

    def forget(self, link: Link) -> None:
        """Both ends of `link` are closed."""
        self._links.discard(link)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.cut()
        await asyncio.sleep(0)  # closed transports say so in the next turn

    def _in_loop(self, work: Callable[[], T]) -> T:
        async def turn() -> T:
            return work()

        return self._run(turn())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_WITHIN_S)


# --- one connection ---------------------------------------------------------------------------------------------------


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
        self._link.connected(self)

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

    def __init__(self, proxy: Proxy, connect: Connect) -> None:
        self._proxy = proxy
        self._connect = connect
        self.client, self.server = End(self), End(self)
        self.client.other, self.server.other = self.server, self.client
        self._silent = proxy.black
        self._script_sent = False
        self._connecting: asyncio.Task[None] | None = None
        self.open = True

    @property
    def alive(self) -> bool:
        """True if bytes pass."""
        return self.open and not self._silent

    def connected(self, end: End) -> None:
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
        """Forward, or do what a fault wants."""
        if self._silent:
            self._proxy.counts.swallowed += len(data)
        elif end is self.client:
            self._script_sent = self._script_sent or b"EVAL" in data
            self._forward(self.server, data)
        else:
            self._answer(data)

    def _answer(self, data: bytes) -> None:
        proxy = self._proxy
        # An error may mean that nothing was executed; only an answer to a script counts as a loss.
        executed = self._script_sent and not data.startswith(b"-")
        self._script_sent = False
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
