"""Access to the operator's routes: a key with that right, or any caller on loopback if no key is asked for."""

from __future__ import annotations

from typing import Any

import structlog
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler

from api.access.identity import Identity, secret_of
from api.access.origin import host_name, is_same_origin, proxy_header
from api.errors.errors import Forbidden, Unauthorized
from control.errors import RedisUnavailable, RequestError
from control.listening import is_loopback

log = structlog.stdlib.get_logger(__name__)

Connection = ASGIConnection[Any, Any, Any, Any]


async def operators_only(connection: Connection, _: BaseRouteHandler) -> None:
    """Raises Unauthorized without a key where one is asked for, and Forbidden for one without the right."""
    identity = await _operator(connection)
    if connection.scope.get("method") not in ("GET", "HEAD"):
        key = identity.key.id if identity.key is not None else None
        log.info("an operator acts", action="operate", path=connection.url.path, key=key)


async def _operator(connection: Connection) -> Identity:
    identity = await connection.app.state.process.gate.identify(secret_of(connection.scope["headers"]))
    if not identity.admin:
        raise _refusal(identity)
    if identity.key is None or not identity.key.admin:
        _check_local(connection)
    return identity


async def is_still_operator(connection: Connection) -> bool:
    """False once the key of an open stream has ended or lost its right; true while that can't be told."""
    try:
        await _operator(connection)
    except (Unauthorized, Forbidden):
        return False
    except RedisUnavailable:
        return True
    return True


def _refusal(identity: Identity) -> RequestError:
    if not identity.account:
        return Unauthorized("Operators need an API key here: one made with `furrow keys create --admin`.")
    return Forbidden("This API key is no operator's. Use one made with `furrow keys create --admin`.")


def _check_local(connection: Connection) -> None:
    """Refuse a page of another origin in this machine's browser, and what a proxy passes on from another machine."""
    headers = connection.headers
    host, origin, passed = headers.get("host", ""), headers.get("origin"), proxy_header(headers)
    if passed is not None:
        raise Forbidden(
            f"Without a key the operator's routes refuse what comes through a proxy (header {passed!r}: "
            f"{headers[passed][:80]!r}). Call this server directly, or use a key made with "
            "`furrow keys create --admin`."
        )
    elsewhere = origin is not None and not is_same_origin(origin, host)
    if not is_loopback(host_name(host)) or elsewhere or headers.get("sec-fetch-site", "none") == "cross-site":
        raise Forbidden(
            "Without a key the operator's routes answer this machine only, by its loopback name and to no page from "
            f"elsewhere (Host: {host[:255]!r}, Origin: {origin and origin[:255]!r}). Use a key made with "
            "`furrow keys create --admin`."
        )
