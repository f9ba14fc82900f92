"""Request bodies as they come in: how much of them this process holds at a time is bounded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from litestar import Request

from control.errors import FurrowError, RequestError


class TooManyBodies(FurrowError):
    """This process reads so many requests at once that its memory would not be bounded with one more."""


class Bodies:
    """Counts the bytes of the bodies that were begun and not yet turned into queued requests.

    Beyond the limit the one that goes on coming is refused; a lone one, which the server's own limit bounds, never is.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.held_bytes = 0

    @asynccontextmanager
    async def reading(self, request: Request[Any, Any, Any]) -> AsyncGenerator[bytes]:
        """The whole body; it counts until the block is left.

        It is not kept with the request, which lives as long as the answer. Raises TooManyBodies, and RequestError for
        one that is compressed.
        """
        _check_encoding(request.headers.get("content-encoding", ""))
        own, chunks = 0, list[bytes]()
        try:
            # What has come counts, not what is announced: a client that sends nothing must not keep others out.
            async for chunk in request.stream():
                if self.held_bytes > own and self.held_bytes + len(chunk) > self._limit:
                    raise TooManyBodies(
                        f"This API process is reading {self.held_bytes >> 20} MiB of requests already. Retry shortly."
                    )
                own += len(chunk)
                self.held_bytes += len(chunk)
                chunks.append(chunk)
            yield b"".join(chunks)
        finally:
            self.held_bytes -= own


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise RequestError(
            f"The body comes with Content-Encoding {encoding[:40]!r}; this server reads no compressed one. Send it "
            "plain.",
            param="content-encoding",
            code="unsupported_content_encoding",
        )
