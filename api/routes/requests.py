"""GET /v1/requests/<rid>, its events, and its cancellation."""

from __future__ import annotations

from typing import Any

from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery

from api.routes.generation import Http, authenticate, caller_of, process_of, refused, streamed
from api.schemas.state import RequestStatus, request_status
from api.schemas.view import StreamCursor, decode_view, parse_cursor
from control import requests
from control.errors import RequestError
from control.redis.connection import arun, arun_every
from control.requests import member_rid


@get("/v1/requests/{rid:str}")
async def show_request(request: Http, rid: FromPath[str], model: FromQuery[str | None] = None) -> RequestStatus:
    """The state of a request, its token counts and the time of each phase."""
    return await _status(request, rid, model)


@get("/v1/requests/{rid:str}/events", status_code=200)
async def follow_request(request: Http, rid: FromPath[str], model: FromQuery[str | None] = None) -> Response[Any]:
    """The request's stream, from its beginning or from Last-Event-ID, on any API process."""
    caller = caller_of(request)
    session = None
    try:
        process_of(request).shutdown.refuse_when_draining()
        caller = caller.identified(authenticate(request))
        last = request.headers.get("last-event-id")
        cursor = parse_cursor(last) if last else None
        if cursor is not None and cursor.rid != rid:
            raise RequestError(
                f"Last-Event-ID names request '{cursor.rid}', the URL names '{rid}'.",
                param="last-event-id",
                code="invalid_event_id",
            )
        session = await process_of(request).sessions.resume(cursor or StreamCursor(rid, []), caller, model)
        await session.settle()
        return streamed(session, caller)
    except Exception as error:
        return refused(error, caller, session)


@delete("/v1/requests/{rid:str}", status_code=200)
async def delete_request(request: Http, rid: FromPath[str], model: FromQuery[str | None] = None) -> RequestStatus:
    """Cancel a request, as POST …/cancel does."""
    return await _cancel(request, rid, model)


@post("/v1/requests/{rid:str}/cancel", status_code=200)
async def cancel_request(request: Http, rid: FromPath[str], model: FromQuery[str | None] = None) -> RequestStatus:
    """Cancel a request: at once while it waits, with its next step while it runs. An ended one is unchanged."""
    return await _cancel(request, rid, model)


async def _status(request: Http, rid: str, model: str | None) -> RequestStatus:
    tenant = authenticate(request)
    process = process_of(request)
    served, fields = await process.sessions.find(rid, tenant, model)
    position = await arun(process.client, requests.position(served.name, rid))
    return request_status(rid, served.name, fields, position)


async def _cancel(request: Http, rid: str, model: str | None) -> RequestStatus:
    tenant = authenticate(request)
    process = process_of(request)
    served, fields = await process.sessions.find(rid, tenant, model)
    members = decode_view(fields["view"]).members
    calls = [
        requests.cancel(served.name, member_rid(rid, member), tenant, "cancelled by the client")
        for member in range(members)
    ]
    await arun_every(process.client, calls)
    return await _status(request, rid, served.name)
