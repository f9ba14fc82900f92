"""Series of the whole farm, from Redis. Only the agent that holds the placement lock shows them, so that they exist
once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from control.errors import RedisUnavailable
from control.placement import farm
from control.placement.host_facts import facts_of_all
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas import health
from control.replicas.health.memory import server_memory
from control.requests.upkeep.dead import count_letters
from worker.agent.metrics.host_series import of_hosts, of_ranks

FRESH_S = 0.9
"""Several scrapes within this time share one look at Redis."""


class FarmCollector(Collector):
    """Shows nothing while this agent does not plan, or while Redis is away."""

    def __init__(self, client: SyncRedis, plans: Callable[[], bool]) -> None:
        """`client`: one of its own, as scrapes run in threads of the server."""
        self._client, self._plans = client, plans
        self._seen: tuple[float, list[Metric]] = (0.0, [])

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names come with the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        if not self._plans():
            return iter(())
        now = time.monotonic()
        if now - self._seen[0] > FRESH_S:
            try:
                self._seen = now, self._look()
            except RedisUnavailable:
                return iter(())
        return iter(self._seen[1])

    def _look(self) -> list[Metric]:
        client = self._client
        overviews, hosts = health.overviews(client), farm.living_hosts(client)
        letters = run_every(client, [count_letters(one.model) for one in overviews])
        facts, drained = facts_of_all(client, farm.known_hosts(client)), farm.drained_hosts(client)
        used = GaugeMetricFamily("furrow_redis_used_bytes", "Memory that Redis uses.", labels=["server"])
        most = GaugeMetricFamily("furrow_redis_max_bytes", "Its maxmemory; 0: none is set.", labels=["server"])
        for server in server_memory(client):
            used.add_metric([server.address], server.used)
            most.add_metric([server.address], server.most)
        return [*_of_models(overviews, letters), *of_hosts(hosts, drained, facts), *of_ranks(overviews), used, most]


def _of_models(overviews: Sequence[health.Overview], letters: Sequence[int]) -> list[Metric]:
    """The series with a label for the model."""

    def gauge(name: str, text: str, value: Callable[[health.Overview], float | None]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        for one in overviews:
            if (number := value(one)) is not None:
                family.add_metric([one.model], number)
        return family

    def counter(name: str, text: str, value: Callable[[health.Overview], float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        for one in overviews:
            family.add_metric([one.model], value(one))
        return family

    dead = dict(zip([one.model for one in overviews], letters, strict=True))
    poisons = CounterMetricFamily(
        "furrow_poisons", "Epochs that were poisoned, by kind.", labels=["model_name", "kind"]
    )
    for one in overviews:
        for kind, count in one.load.poisons.items():
            poisons.add_metric([one.model, kind], count)
    return [
        gauge("vllm:num_requests_waiting", "Requests that no leader has.", lambda one: one.load.queued),
        gauge("furrow_queued_tokens", "Prompt tokens of requests that wait.", lambda one: one.load.queued_tokens),
        gauge(
            "furrow_expected_wait_seconds",
            "Time until a new request is claimed; absent where too little was seen to tell.",
            lambda one: None if one.load.expected_wait_ms is None else one.load.expected_wait_ms / 1000,
        ),
        gauge("furrow_replicas_wanted", "Replicas that the operator wants.", _wanted),
        gauge("furrow_replicas_serving", "Replicas that serve.", lambda one: _in_state(one, "loaded")),
        gauge("furrow_replicas_failed", "Replicas that a host has given up.", _failed),
        gauge("furrow_replicas_unplaced", "Wanted replicas that no host has, or has room for.", _unplaced),
        gauge("furrow_model_paused", "1 while leaders claim no request of the model.", lambda one: one.paused),
        gauge(
            "furrow_dead_letters", "Requests that crashed their group when they ran alone.", lambda one: dead[one.model]
        ),
        counter("furrow_requests_enqueued", "Requests that came.", lambda one: one.load.enqueued),
        counter("furrow_requests_ended", "Requests that ended, in any way.", lambda one: one.load.ended),
        counter("furrow_epochs", "Epochs that a leader has begun.", lambda one: one.load.epochs),
        poisons,
    ]


def _in_state(one: health.Overview, state: health.ReplicaState) -> int:
    return sum(replica.state == state for replica in one.replicas)


def _wanted(one: health.Overview) -> int:
    """0 for a model that is being unloaded."""
    return 0 if one.state in ("draining", "unloading") else one.wanted


def _failed(one: health.Overview) -> int:
    return sum(replica.state == "failed" and replica.placed for replica in one.replicas)


def _unplaced(one: health.Overview) -> int:
    return max(0, _wanted(one) - sum(replica.placed for replica in one.replicas))
