"""GET /v1/usage: the usage of the caller's key."""

from __future__ import annotations

from litestar import get
from litestar.params import FromQuery

from api.routes.farm.access import check_days
from api.routes.generation import Http, identity_of, process_of
from api.schemas.farm import UsageList
from control.access import usage
from control.errors import RequestError


@get("/v1/usage")
async def own_usage(request: Http, days: FromQuery[int] = 30) -> UsageList:
    """Requests and tokens of the caller's own key in the last days (UTC, today included), per day and model."""
    account = identity_of(request).account
    if not account:
        raise RequestError("Usage is counted per API key, and this request brought none.", code="no_api_key")
    reads = process_of(request).account_reads
    return UsageList(data=await reads.read(account, usage, check_days(days), account))
