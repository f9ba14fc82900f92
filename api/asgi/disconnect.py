"""Noticing that a client left while its answer, which is not streamed, is still being made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from litestar import Request


@contextmanager
def disconnect_watched(request: Request[Any, Any, Any], wake: asyncio.Event) -> Generator[Callable[[], bool]]:
    """Yields a function: True once the client has left, which sets `wake`. The body must have been read before."""
    leaving = asyncio.ensure_future(_disconnected(request))
    leaving.add_done_callback(lambda _: wake.set())
    try:
        yield leaving.done
    finally:
        leaving.cancel()


async def _disconnected(request: Request[Any, Any, Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
