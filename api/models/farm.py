"""The farm as operators are shown it."""

from __future__ import annotations

from api.schemas.farm import FarmCard
from control import access
from control.operations.checks.report import read_farm_findings, read_redis
from control.placement import farm
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health
from control.requests.upkeep.dead import count_letters


def read_farm(client: SyncRedis, *, shared: bool = False) -> FarmCard:
    """The whole farm. `shared`: its models as any API process read them within the last second.

    Raises RedisUnavailable.
    """
    models = health.shared_overviews(client) if shared else health.overviews(client)
    letters = run_every(client, [count_letters(one.model) for one in models])
    hosts = farm.host_cards(client)
    servers, about_servers = read_redis(client)
    return FarmCard(
        models=models,
        hosts=hosts,
        apis=farm.living_apis(client),
        dead_letters={one.model: count for one, count in zip(models, letters, strict=True) if count},
        keys=run(client, access.count()),
        redis=servers,
        findings=[*about_servers, *read_farm_findings(client, hosts, models)],
    )
