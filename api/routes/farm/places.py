"""/farm, /farm/events and /farm/hosts: the state of the farm, the drain of hosts and replicas, and the
end of a host."""

from __future__ import annotations

from litestar import get, post
from litestar.openapi import ResponseSpec
from litestar.params import FromQuery
from litestar.response import Stream

from api.http.gate import is_still_operator
from api.models.farm import read_farm
from api.routes.farm.threaded import Http, body_of, on_farm
from api.routes.generation import process_of
from api.schemas.bodies import taking
from api.schemas.farm import Done, FarmCard, HostNamed, Hosts, HostToDrain, Plots, ReplicaNamed
from control.errors import RequestError
from control.operations.checks.report import host_reports
from control.operations.plots import samples
from control.placement import farm, membership
from control.redis.clients import SyncRedis


@get("/")
async def show_farm(request: Http) -> FarmCard:
    """Models, hosts, API processes, dead letters and keys."""
    return await on_farm(request, read_farm)


@get("/events", responses={200: ResponseSpec(str, media_type="text/event-stream", generate_examples=False)})
async def follow_farm(request: Http) -> Stream:
    """The state of the farm once a second, as server-sent events: `farm` with the answer of GET /farm, or `away`. The
    stream ends when the operator's key does."""
    # The type as a header: the framework would let the handler's annotation decide it.
    headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
    return Stream(
        process_of(request).farm_events.follow(lambda: is_still_operator(request)),
        headers=headers | {"x-accel-buffering": "no"},
    )


@get("/plots")
async def show_plots(request: Http) -> Plots:
    """Samples of the last hour, one every ten seconds, oldest first: tokens a second, milliseconds to the first token,
    waiting and running requests and KV memory, of the farm (under the name "") and of its busiest models."""
    return Plots(data=await on_farm(request, samples))


@get("/hosts")
async def show_hosts(request: Http, host: FromQuery[str | None] = None) -> Hosts:
    """Every known host, or one, with its assigned replicas, the facts that its agent publishes, and what is wrong."""
    return Hosts(data=await on_farm(request, host_reports, host))


@post("/hosts/drain", status_code=200, operation_class=taking(HostToDrain))
async def drain_host(request: Http) -> Done:
    """Move the replicas of a host to others and place no more there; or undo that."""
    return await on_farm(request, _drain_host, await body_of(request, HostToDrain))


def _drain_host(client: SyncRedis, body: HostToDrain) -> Done:
    hosts = membership.known_hosts(client)
    if body.host not in hosts:
        there = ", ".join(hosts) or "there is none"
        raise RequestError(f"Host {body.host!r} is unknown; known: {there}.", param="host", code="host_not_found")
    membership.drain(client, body.host, drained=not body.undo)
    return Done(done=f"{body.host}: {'takes replicas again' if body.undo else 'drains'}.")


@post("/hosts/forget", status_code=200, operation_class=taking(HostNamed))
async def forget_host(request: Http) -> Done:
    """Remove a host that is away for good, and has no replica, from all lists. One that comes back is known again."""
    body = await body_of(request, HostNamed)
    await on_farm(request, farm.forget, body.host)
    return Done(done=f"{body.host}: forgotten.")


@post("/replicas/drain", status_code=200, operation_class=taking(ReplicaNamed))
async def drain_replica(request: Http) -> Done:
    """Stop one replica once its requests have finished; another one replaces it."""
    body = await body_of(request, ReplicaNamed)
    await on_farm(request, farm.drain_replica, body.model, body.replica)
    return Done(done=f"{body.model}:{body.replica}: drains.")
