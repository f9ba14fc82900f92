"""The farm's hosts with their facts, its Redis servers, and the warnings and errors about both: for the HTTP API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from redis import exceptions as redis_errors

from control.messages import ModelSpec
from control.operations.checks.findings import Checks, Finding
from control.operations.checks.hosts import check_breaches, check_clocks, check_files, check_host
from control.operations.checks.redis_server import (
    check_clients,
    check_eviction,
    check_memory,
    check_persistence,
    check_replicas,
    check_role,
)
from control.placement import farm
from control.placement.farm import HostCard
from control.placement.membership import HostFacts, facts_of_all
from control.records import catalog
from control.records.api_reports import Breach, breaches_of
from control.redis.clients import SyncRedis, unavailable
from control.redis.cluster import servers_of
from control.redis.pipeline import ABSENT
from control.redis.urls import address
from control.replicas.model_overviews import Overview


class HostReport(HostCard, kw_only=True):
    """A host with what its agent publishes about it, and what `furrow doctor` would say of that."""

    facts: HostFacts | None
    """None while its agent is away, and for some seconds after its start."""
    findings: list[Finding]
    """Warnings and errors about this host alone."""


class RedisCard(msgspec.Struct, kw_only=True):
    """One Redis server. Bytes; `most` is its maxmemory, 0 for none."""

    address: str
    used: int
    most: int
    eviction: str
    """Its maxmemory-policy."""
    append_only: bool
    """True while it writes an append-only file."""
    persistence: str
    """The state of the latest write of that file and of the latest snapshot: `ok` or the one that failed."""


def host_reports(client: SyncRedis, host: str | None = None) -> list[HostReport]:
    """Every known host, or one; none where that is unknown. Raises RedisUnavailable."""
    cards = [card for card in farm.host_cards(client) if host in (None, card.id)]
    facts = facts_of_all(client, [card.id for card in cards])
    return [
        HostReport(
            **msgspec.structs.asdict(card), facts=facts[card.id], findings=wrong(check_host(card, facts[card.id]))
        )
        for card in cards
    ]


def farm_findings(
    cards: Sequence[HostCard],
    facts: Mapping[str, HostFacts | None],
    specs: Sequence[ModelSpec],
    models: Sequence[Overview],
    breaches: Mapping[str, Sequence[Breach]],
) -> list[Finding]:
    """Warnings and errors about the hosts and about the files that they have, but for what `models` tell; and about
    the files of models that broke their bounds."""
    clocks = Checks("hosts")
    times = {name: own.clock_ms for name, own in facts.items() if own is not None}
    if times:
        check_clocks(times, clocks)
    findings = [*clocks.findings, *(one for card in cards for one in check_host(card, facts.get(card.id)))]
    reasons = {model.model: {replica.detail for replica in model.replicas} for model in models}
    for spec in specs:
        files = Checks("models", spec.name)
        check_files(spec, cards, facts, files, reasons.get(spec.name, set()))
        check_breaches(breaches.get(spec.name, ()), files)
        findings += files.findings
    return wrong(findings)


def read_farm_findings(client: SyncRedis, cards: Sequence[HostCard], models: Sequence[Overview]) -> list[Finding]:
    """As `farm_findings`, with facts and specifications as Redis has them. Raises RedisUnavailable."""
    facts = facts_of_all(client, [card.id for card in cards])
    specs = catalog.list_specs(client)
    breaches = breaches_of(client, [spec.name for spec in specs])
    return farm_findings(cards, facts, specs, models, breaches)


def read_redis(client: SyncRedis) -> tuple[list[RedisCard], list[Finding]]:
    """Each primary, and the warnings and errors about it; none where INFO is not allowed. Raises RedisUnavailable."""
    cards: list[RedisCard] = []
    findings: list[Finding] = []
    try:
        for server in servers_of(client):
            info = server.info()
            cards.append(_card(address(server), info))
            checks = Checks("redis", address(server))
            for check in (check_role, check_replicas, check_eviction, check_persistence, check_memory, check_clients):
                check(info, checks)
            findings += checks.findings
    except ABSENT as error:
        raise unavailable(client, error) from error
    except redis_errors.ResponseError:
        return [], []
    return cards, wrong(findings)


def wrong(findings: Sequence[Finding]) -> list[Finding]:
    """Those that are no mere statement."""
    return [finding for finding in findings if finding.level != "ok"]


def _card(where: str, info: dict[str, Any]) -> RedisCard:
    failed = [
        name
        for name, field in (("append-only file", "aof_last_write_status"), ("snapshot", "rdb_last_bgsave_status"))
        if info.get(field, "ok") != "ok"
    ]
    return RedisCard(
        address=where,
        used=int(info.get("used_memory", 0)),
        most=int(info.get("maxmemory", 0)),
        eviction=str(info.get("maxmemory_policy", "unknown")),
        append_only=bool(int(info.get("aof_enabled", 0))),
        persistence=", ".join(failed) + " failed" if failed else "ok",
    )
