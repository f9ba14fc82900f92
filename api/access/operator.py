"""Who may use the operator's routes: a key with that right, or whoever is there on loopback, if no key is asked for."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import structlog
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from api.access.identity import Identity, secret_of
from api.errors import Forbidden, Unauthorized
from control.errors import RequestError
from control.listening import is_loopback

log = structlog.stdlib.get_logger(__name__)

Connection = ASGIConnection[Any, Any, Any, Any]


async def operators_only(connection: Connection, _: BaseRouteHandler) -> None:
    """Raises Unauthorized without a key where one is asked for, and Forbidden for one without the right."""
    identity = await connection.app.state.process.gate.identify(secret_of(connection.headers))
    if not identity.admin:
        raise _refusal(identity)
    if identity.key is None or not identity.key.admin:
        _check_local(connection)
    if connection.scope.get("method") not in ("GET", "HEAD"):
        key = identity.key.id if identity.key is not None else None
        log.info("an operator acts", action="operate", path=connection.url.path, key=key)


def _refusal(identity: Identity) -> RequestError:
    if not identity.account:
        return Unauthorized("Operators need an API key here: one made with `furrow keys create --admin`.")
    return Forbidden("This API key is no operator's. Use one made with `furrow keys create --admin`.")


def _check_local(connection: Connection) -> None:
    """A page from elsewhere in this machine's browser is no operator: its requests name another origin, or host."""
    host = connection.headers.get("host", "")
    name = urlsplit(f"//{host}").hostname or ""
    origin = connection.headers.get("origin")
    elsewhere = origin is not None and urlsplit(origin).netloc != host
    if not is_loopback(name) or elsewhere or connection.headers.get("sec-fetch-site", "none") == "cross-site":
        raise Forbidden(
            "Without a key the operator's routes answer this machine only, by its loopback name and to no page from "
            f"elsewhere (Host: {host!r}, Origin: {origin!r}). Use a key made with `furrow keys create --admin`."
        )
