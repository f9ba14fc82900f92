"""/farm and /farm/hosts: the state of the farm, and the drain of hosts and replicas."""

from __future__ import annotations

from litestar import get, post

from api.openapi.openapi import taking
from api.routes.farm.threaded import Http, body_of, on_farm
from api.schemas.farm import Done, FarmCard, HostCard, Hosts, HostToDrain, ReplicaNamed
from control import access, requests
from control.errors import RequestError
from control.placement import farm
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health


@get("/")
async def show_farm(request: Http) -> FarmCard:
    """Models, hosts, API processes, dead letters and keys."""
    return await on_farm(request, _show)


def _show(client: SyncRedis) -> FarmCard:
    models = [spec.name for spec in catalog.list_specs(client)]
    letters = run_every(client, [requests.dead_letters(model) for model in models])
    return FarmCard(
        models=health.overviews(client),
        hosts=_hosts(client),
        apis=farm.living_apis(client),
        dead_letters={model: len(found) for model, found in zip(models, letters, strict=True) if found},
        keys=run(client, access.count()),
    )


@get("/hosts")
async def show_hosts(request: Http) -> Hosts:
    """Every known host, with its state and its assigned replicas."""
    return Hosts(data=await on_farm(request, _hosts))


def _hosts(client: SyncRedis) -> list[HostCard]:
    living = {host.id: host for host in farm.living_hosts(client)}
    drained = farm.drained_hosts(client)
    return [
        HostCard(
            id=name,
            alive=name in living,
            drained=name in drained,
            devices=list(living[name].devices) if name in living else [],
            replicas=sorted(f"{one.spec.name}:{one.replica}" for one in farm.assignments(client, name)),
        )
        for name in farm.known_hosts(client)
    ]


@post("/hosts/drain", status_code=200, operation_class=taking(HostToDrain))
async def drain_host(request: Http) -> Done:
    """Move the replicas of a host to others and place no more there; or undo that."""
    return await on_farm(request, _drain_host, await body_of(request, HostToDrain))


def _drain_host(client: SyncRedis, wanted: HostToDrain) -> Done:
    known = farm.known_hosts(client)
    if wanted.host not in known:
        there = ", ".join(known) or "there is none"
        raise RequestError(f"Host {wanted.host!r} is unknown; known: {there}.", param="host", code="host_not_found")
    farm.drain(client, wanted.host, drained=not wanted.undo)
    return Done(done=f"{wanted.host}: {'takes replicas again' if wanted.undo else 'drains'}.")


@post("/replicas/drain", status_code=200, operation_class=taking(ReplicaNamed))
async def drain_replica(request: Http) -> Done:
    """Stop one replica once its requests have finished; another one replaces it."""
    wanted = await body_of(request, ReplicaNamed)
    await on_farm(request, farm.drain_replica, wanted.model, wanted.replica)
    return Done(done=f"{wanted.model}:{wanted.replica}: drains.")
