"""HEAD as HTTP means it: GET without the body, for the probes and clients that ask so."""

from __future__ import annotations

from litestar.types import ASGIApp, Receive, Scope, Send


def answering_head(app: ASGIApp) -> ASGIApp:
    """`app`, which knows GET alone; the server leaves the body out. A stream is not begun for a HEAD."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and not scope["path"].endswith("/events"):
            # A copy: by its own the server knows that no body must go out.
            scope = scope.copy()
            scope["method"] = "GET"
        await app(scope, receive, send)

    return answer
