"""The same routes with and without `/v1`: clients differ in whether their base URL ends with it."""

from __future__ import annotations

import re

from litestar.types import ASGIApp, Receive, Scope, Send

_PREFIXES = re.compile(r"^(?:/v1)+(?=/)")
_WITH = frozenset(
    ("chat", "completions", "embeddings", "messages", "models", "requests", "rerank", "responses", "usage")
)
"""First parts of the paths under `/v1`."""
_WITHOUT = frozenset(
    (
        "detokenize",
        "health",
        "infill",
        "load",
        "metrics",
        "ping",
        "ready",
        "score",
        "tokenize",
        "tokenizer_info",
        "version",
    )
)
"""Paths beside `/v1`."""
_COHERE = {"/v2/embed": "/v2/embed", "/v2/rerank": "/v1/rerank"}
"""The paths of newer Cohere clients, with the route of each."""


def canonical(path: str) -> str:
    """The path of the route that is meant; other paths as they are. A prefix that comes twice counts once."""
    rest = _PREFIXES.sub("", path)
    if (route := _COHERE.get(rest)) is not None:
        return route
    first = rest[1:].partition("/")[0]
    if first in _WITH:
        return f"/v1{rest}"
    return rest if first in _WITHOUT else path


def with_any_prefix(app: ASGIApp) -> ASGIApp:
    """`app`, which has each route once."""

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := canonical(scope["path"])) != scope["path"]:
            scope["path"] = path
        await app(scope, receive, send)

    return route
