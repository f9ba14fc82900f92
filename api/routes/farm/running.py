"""/farm/requests: waiting and running requests of all tenants."""

from __future__ import annotations

from litestar import get, post
from litestar.params import FromPath, FromQuery

from api.routes.farm.threaded import Http, body_of, on_farm
from api.schemas.bodies import taking
from api.schemas.farm import Done, EndedRequests, RequestNamed, Requests
from control import requests
from control.records import catalog
from control.records.api_reports import ended
from control.redis.clients import SyncRedis
from control.requests import OpenRequest
from control.requests.upkeep.running import RequestLife, life_of

_MOST = 1_000


@get("/requests")
async def list_requests(
    request: Http, model: FromQuery[str | None] = None, tenant: FromQuery[str | None] = None
) -> Requests:
    """The oldest 1,000 requests that wait or run, oldest first, of all models and tenants or of one."""
    return Requests(data=await on_farm(request, _list, model, tenant))


def _list(client: SyncRedis, model: str | None, tenant: str | None) -> list[OpenRequest]:
    return requests.open_requests(client, catalog.model_names(client, model), _MOST, tenant)


@get("/requests/ended")
async def list_ended(
    request: Http,
    model: FromQuery[str | None] = None,
    tenant: FromQuery[str | None] = None,
    failed: FromQuery[bool | None] = None,
) -> EndedRequests:
    """The newest 1,000 requests that ended in the last hour, as API processes saw them, of all models and tenants or of
    one; those that failed, or did not."""
    return EndedRequests(data=await on_farm(request, ended, _MOST, model, tenant, failed))


@get("/requests/{rid:str}")
async def show_life(request: Http, rid: FromPath[str]) -> RequestLife:
    """The phases of one request, the epochs that had it and the faults that it met; until two minutes after its end."""
    return await on_farm(request, _life, rid)


def _life(client: SyncRedis, rid: str) -> RequestLife:
    return life_of(client, catalog.model_names(client), rid)


@post("/requests/cancel", status_code=200, operation_class=taking(RequestNamed))
async def cancel_request(request: Http) -> Done:
    """End a request of any tenant: at once while it waits, with its next step while it runs."""
    rid = (await body_of(request, RequestNamed)).id
    return await on_farm(request, _cancel, rid)


def _cancel(client: SyncRedis, rid: str) -> Done:
    state = requests.cancel_any(client, catalog.model_names(client), rid)
    words = "ends with its next step" if state == "running" else f"is {state}"
    return Done(done=f"{rid}: {words}.", id=rid)
