"""/farm/keys and /farm/usage: API keys, their limits and usage."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from litestar import Response, get, post
from litestar.params import FromQuery

from api.routes.farm.threaded import Http, body_of, on_farm
from api.schemas.bodies import taking
from api.schemas.farm import KeyCard, KeyLimits, KeyNamed, Keys, KeyToChange, KeyToCreate, UsageList, key_card
from api.schemas.generation import check_number
from control import access
from control.access import usage
from control.errors import RequestError
from control.redis.clients import SyncRedis


@get("/keys")
async def list_keys(request: Http) -> Keys:
    """Every API key, oldest first, revoked and expired ones included."""
    now = time.time()
    keys = await on_farm(request, access.list_keys)
    return Keys(data=[key_card(key, now, used) for key, used in keys])


@post("/keys", status_code=201, operation_class=taking(KeyToCreate))
async def create_key(request: Http) -> Response[KeyCard]:
    """Make an API key. Only this answer has its secret."""
    body = await body_of(request, KeyToCreate)
    fields = _within_bounds(body)
    key, secret = access.mint(name=body.name, tenant=body.tenant, admin=body.admin, **fields)
    await on_farm(request, access.create, key)
    return Response(key_card(key, time.time(), 0, secret), status_code=201, headers={"cache-control": "no-store"})


@post("/keys/limits", status_code=200, operation_class=taking(KeyToChange))
async def change_limits(request: Http) -> KeyCard:
    """Change the limits of a key; null: unchanged."""
    return await on_farm(request, _change, await body_of(request, KeyToChange))


def _change(client: SyncRedis, body: KeyToChange) -> KeyCard:
    changes = _within_bounds(body)
    if not changes:
        names = ", ".join(field.name for field in msgspec.structs.fields(KeyToChange) if field.name != "key")
        raise RequestError(f"Say what to change of the key: {names}.")
    return key_card(access.change(client, access.find(client, body.key), **changes), time.time())


@post("/keys/revoke", status_code=200, operation_class=taking(KeyNamed))
async def revoke_key(request: Http) -> KeyCard:
    """Revoke a key, within about a second. Its running requests continue."""
    return await on_farm(request, _revoke, (await body_of(request, KeyNamed)).key)


def _revoke(client: SyncRedis, named: str) -> KeyCard:
    return key_card(access.revoke(client, access.find(client, named)), time.time())


@get("/usage")
async def show_usage(request: Http, days: FromQuery[int] = 30, key: FromQuery[str | None] = None) -> UsageList:
    """The usage of every key, or of one, in the last days (UTC, today included), per day and model."""
    return UsageList(data=await on_farm(request, _usage, check_days(days), key))


def _usage(client: SyncRedis, days: int, key: str | None) -> list[access.Usage]:
    return usage(client, days, access.find(client, key).id if key is not None else None)


def check_days(days: int) -> int:
    """Raises RequestError for more than is kept."""
    check_number("days", days)
    return days


def _within_bounds(limits: KeyLimits) -> dict[str, Any]:
    """The limits that are given. Raises RequestError for a number beyond its range."""
    fields = limits.set_fields()
    for name, value in fields.items():
        if isinstance(value, int):
            check_number(name, value)
    return fields
