"""A lossy way to Redis: it forwards bytes, and on demand cuts, delays, swallows or stops them in the middle.

It runs in a thread of its own, so that a strike may wait while the farm's bytes still flow. It need not understand the
protocol: that something of a script's reply came back from the server is enough to know that the script was executed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ops.chaos.system.links import Link, Lossy

HOST = "127.0.0.1"
_ANSWER_WITHIN_S = 10.0

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


class Proxy(Lossy):
    """One listener on loopback in front of one server. `start` and `stop` from any thread, faults from any other."""

    def __init__(self, upstream: Upstream) -> None:
        super().__init__()
        self._upstream = upstream
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
        self._in_loop(self._listen)
        return self.url

    def stop(self) -> None:
        """Cut everything and end the thread. Harmless when it is not running."""
        if not self._thread.is_alive():
            return
        self._in_loop(self._close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ANSWER_WITHIN_S)
        self._loop.close()

    # --- faults -----------------------------------------------------------------------------------------------------

    def cut(self, chosen: Callable[[], bool] = lambda: True) -> int:
        """Reset every open connection for which `chosen()`; how many they were. Nothing hinders them to come back."""

        async def strike() -> int:
            links = [link for link in self._links if link.alive and chosen()]
            for link in links:
                link.cut()
            self.counts.cut += len(links)
            return len(links)

        return self._in_loop(strike)

    def drop_replies(self, times: int, ending: Ending = "cut") -> None:
        """Let the next `times` scripts be executed and their answers never arrive.

        After it the connection is reset ("cut"), or says nothing any more until the client's time-out ("silence").
        """

        async def arm() -> None:
            self.to_drop, self.drop_ending = times, ending

        self._in_loop(arm)

    def split_replies(self, times: int) -> None:
        """Deliver only the first half of the next `times` answers to scripts, then reset the connection."""

        async def arm() -> None:
            self.to_split = times

        self._in_loop(arm)

    def delay(self, seconds: float) -> None:
        """From now on every chunk is late by so much, in both directions; 0 ends it."""

        async def arm() -> None:
            self.delay_s = seconds

        self._in_loop(arm)

    def black_hole(self, chosen: Callable[[], bool] = lambda: True, *, newcomers: bool = True) -> int:
        """Silence without a reset: open connections for which `chosen()` never carry a byte again, and while it lasts
        new ones neither (`newcomers`). Returns how many were open."""

        async def strike() -> int:
            self.black = newcomers
            links = [link for link in self._links if link.alive and chosen()]
            for link in links:
                link.silence()
            return len(links)

        return self._in_loop(strike)

    def heal(self) -> None:
        """End what lasts. Connections that fell into a black hole stay there, as after a router forgot them."""

        async def disarm() -> None:
            self.black, self.delay_s, self.to_drop, self.to_split = False, 0.0, 0, 0

        self._in_loop(disarm)

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

    def _in_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(_ANSWER_WITHIN_S)
