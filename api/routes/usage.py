"""GET /v1/usage: what the key that asks has used."""

from __future__ import annotations

from typing import Any

from litestar import Request, get
from litestar.params import FromQuery

from api.routes.farm.access import check_days
from api.routes.farm.threaded import on_farm
from api.routes.generation import identity_of
from api.schemas.farm import UsageList
from control.access.usage import usage
from control.errors import RequestError


@get("/v1/usage")
async def own_usage(request: Request[Any, Any, Any], days: FromQuery[int] = 30) -> UsageList:
    """Requests and tokens of the caller's own key in the last days (UTC, today included), per day and model."""
    account = identity_of(request).account
    if not account:
        raise RequestError("Usage is counted per API key, and this request brought none.", code="no_api_key")
    return UsageList(data=await on_farm(request, usage, check_days(days), account))
