"""The /metrics of a host: the counters of its ranks, the host's own series and those of the farm."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Protocol

import psutil
import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from control.errors import RedisUnavailable, SettingsError
from control.placement import membership
from control.placement.membership import HostFacts, facts_of_all
from control.placement.placement import Host
from control.placement.rollout import Place
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.redis.servers import server_memory
from control.replicas import model_overviews
from control.requests.upkeep.dead import count_letters
from worker.agent.metrics_server import DEFAULT_ADDRESS, MetricsServer, parse_address
from worker.rank.counters import FOLDER_KEY, FOLDER_VARIABLE, SUFFIX, Counters, Labels, read_counters
from worker.rank.series import ALL, Series

log = structlog.get_logger()


# The counters of this host's ranks as Prometheus metrics.


_SERVED_BY = ("furrow_replica_served_by", "Always 1: the replica's tokens are computed by this engine.")
_MEMORY = ("furrow_rank_memory_bytes", "Resident memory of the rank's process.")


class RankCollector(Collector):
    """Reads every rank's counters in a folder. Those of ranks that have ended count on; their gauges are left out."""

    def __init__(self, folder: Path, places: Callable[[], Collection[Place]]) -> None:
        """`places`: the replicas that this host has. Counters of others go with the last process."""
        self._folder = folder
        self._places = places
        self._open: dict[Path, tuple[int, Labels, Counters]] = {}
        """The files that are mapped, with their inodes."""

    def collect(self) -> Iterator[Metric]:
        ranks = list(self._ranks())
        for series in ALL:
            yield _family(series, ranks)
        engines = _gauge(*_SERVED_BY, "model_name", "engine", "served_by")
        for labels, _ in ranks:
            if not labels.rank:
                engines.add_metric([labels.model, labels.replica, labels.served_by], 1)
        yield engines
        memory = _gauge(*_MEMORY, "model_name", "engine", "rank")
        for labels, counters in ranks:
            size = _resident(counters.pid)
            if size is not None:
                memory.add_metric([labels.model, labels.replica, str(labels.rank)], size)
        yield memory

    def describe(self) -> Iterator[Metric]:
        """Nothing: a registry would else collect once to know the names."""
        return iter(())

    def _ranks(self) -> Iterator[tuple[Labels, Counters]]:
        """The counters to show. Files of replicas that have left this host are deleted."""
        places = set(self._places())
        opened: dict[Path, tuple[int, Labels, Counters]] = {}
        for file in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                inode = file.stat().st_ino
                before = self._open.get(file)
                entry = before if before is not None and before[0] == inode else (inode, *read_counters(file))
            except (OSError, ValueError):  # of another version of Furrow, or deleted just now
                continue
            _, labels, counters = entry
            if (labels.model, labels.replica) not in places and not psutil.pid_exists(counters.pid):
                file.unlink(missing_ok=True)
                continue
            opened[file] = entry
            yield labels, counters
        self._open = opened


def _family(series: Series, ranks: list[tuple[Labels, Counters]]) -> Metric:
    """One series of all ranks; a leaders' series of the replicas whose leader is here."""
    names = ["model_name", "engine", *(["rank"] if series.rank else []), *([series.label] if series.label else [])]
    family: Any = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }[series.kind](series.name, series.help, labels=names)
    for labels, counters in ranks:
        if labels.rank and not series.rank:
            continue
        values = [labels.model, labels.replica, *([str(labels.rank)] if series.rank else [])]
        cells = counters.read(series)
        if series.kind == "histogram":
            family.add_metric(values, _buckets(series, cells), sum_value=cells[-1])
        elif series.kind == "counter" or psutil.pid_exists(counters.pid):
            for value, cell in zip(series.values, cells, strict=True):
                family.add_metric([*values, *([value] if series.label else [])], cell)
    return family


def _buckets(series: Series, cells: list[float]) -> list[tuple[str, float]]:
    """The cumulative counts by upper bound, as Prometheus wants them."""
    bounds = [*(repr(bound) for bound in series.bounds), "+Inf"]
    total = 0.0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip(bounds, cells, strict=False):
        total += count
        buckets.append((bound, total))
    return buckets


def _resident(pid: int) -> int | None:
    """Bytes of a process that lives; None for one that has ended."""
    try:
        return psutil.Process(pid).memory_info().rss if pid else None
    except psutil.Error:
        return None


# Series of the farm's hosts and of the commands of its ranks.


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=labels)


def of_hosts(living: Sequence[Host], drained: AbstractSet[str], facts: Mapping[str, HostFacts | None]) -> list[Metric]:
    """`facts` has every known host; None for one that has told none, or whose facts have lapsed."""
    alive = {host.id for host in living}
    states = _gauge("furrow_hosts", "Hosts of the farm, by state.", "state")
    states.add_metric(["alive"], len(alive - drained))
    states.add_metric(["drained"], len(alive & drained))
    states.add_metric(["away"], len(facts.keys() - alive))
    up = _gauge("furrow_host_up", "1 while the host's agent has a heartbeat; absent of a drained host without.", "host")
    version = _gauge("furrow_host_info", "Furrow's version on the host.", "host", "version")
    clock = _gauge("furrow_host_clock_offset_seconds", "The host's clock minus that of Redis.", "host")
    trip = _gauge(
        "furrow_host_redis_round_trip_seconds", "Fastest of a few round trips from the host to Redis.", "host"
    )
    free = _gauge("furrow_host_free_bytes", "Free space of a folder that the host writes.", "host", "folder")
    for name, host_facts in facts.items():
        if name in alive or name not in drained:
            up.add_metric([name], name in alive)
        if host_facts is None:
            continue
        version.add_metric([name, host_facts.version], 1)
        clock.add_metric([name], host_facts.clock_ms / 1000)
        trip.add_metric([name], host_facts.round_trip_ms / 1000)
        for folder in ("models", "cache", "shared_memory"):
            space = getattr(host_facts, folder)
            if space is not None:
                free.add_metric([name, folder], space.free)
    return [states, up, version, clock, trip, free]


def of_ranks(overviews: Sequence[model_overviews.Overview]) -> list[Metric]:
    """The commands of ranks that have a heartbeat."""
    labels = ("model_name", "engine", "rank", "host")
    age = _gauge("furrow_rank_command_seconds", "Age of the rank's command; 0 between two.", *labels)
    stalled = _gauge(
        "furrow_rank_stalled_seconds", "Time since the rank got on in its command; 0 between two.", *labels
    )
    progress = _gauge("furrow_rank_progress", "A number that changes as the rank gets on in its command.", *labels)
    slow = _gauge("furrow_rank_slow", "1 while the other ranks of its group wait for it.", *labels)
    for overview in overviews:
        for replica in overview.replicas:
            for rank, beat in enumerate(replica.beats):
                if beat is not None:
                    values = [overview.model, replica.replica, str(rank), beat.host]
                    age.add_metric(values, beat.oldest_pending_ms / 1000)
                    stalled.add_metric(values, beat.stalled_ms / 1000)
                    progress.add_metric(values, beat.progress)
                    slow.add_metric(values, rank in replica.slow)
    return [age, stalled, progress, slow]


# Series of the whole farm, from Redis. Only the agent that holds the placement lock shows them, so that they exist
# once.


FRESH_S = 0.9
"""Several scrapes within this time share one look at Redis."""


class FarmCollector(Collector):
    """Shows nothing while this agent does not plan, or while Redis is away."""

    def __init__(self, client: SyncRedis, plans: Callable[[], bool]) -> None:
        """`client`: one of its own, as scrapes run in threads of the server."""
        self._client = client
        self._plans = plans
        self._latest: tuple[float, list[Metric]] = (0.0, [])

    def describe(self) -> Iterator[Metric]:
        """Nothing: the names come with the first scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        if not self._plans():
            return iter(())
        now = time.monotonic()
        if now - self._latest[0] > FRESH_S:
            try:
                self._latest = now, self._look()
            except RedisUnavailable:
                return iter(())
        return iter(self._latest[1])

    def _look(self) -> list[Metric]:
        client = self._client
        overviews = model_overviews.overviews(client)
        hosts = membership.living_hosts(client)
        letters = run_every(client, [count_letters(overview.model) for overview in overviews])
        facts = facts_of_all(client, membership.known_hosts(client))
        drained = membership.drained_hosts(client)
        used_bytes = _gauge("furrow_redis_used_bytes", "Memory that Redis uses.", "server")
        most = _gauge("furrow_redis_max_bytes", "Its maxmemory; 0: none is set.", "server")
        for server in server_memory(client):
            used_bytes.add_metric([server.address], server.used)
            most.add_metric([server.address], server.most)
        return [
            *_of_models(overviews, letters),
            *of_hosts(hosts, drained, facts),
            *of_ranks(overviews),
            used_bytes,
            most,
        ]


def _of_models(overviews: Sequence[model_overviews.Overview], letters: Sequence[int]) -> list[Metric]:
    """The series with a label for the model."""

    def gauge(name: str, text: str, value: Callable[[model_overviews.Overview], float | None]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        for overview in overviews:
            if (number := value(overview)) is not None:
                family.add_metric([overview.model], number)
        return family

    def counter(name: str, text: str, value: Callable[[model_overviews.Overview], float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        for overview in overviews:
            family.add_metric([overview.model], value(overview))
        return family

    dead = dict(zip([overview.model for overview in overviews], letters, strict=True))
    poisons = CounterMetricFamily(
        "furrow_poisons", "Epochs that were poisoned, by kind.", labels=["model_name", "kind"]
    )
    for overview in overviews:
        for kind, count in overview.load.poisons.items():
            poisons.add_metric([overview.model, kind], count)
    return [
        gauge("vllm:num_requests_waiting", "Requests that no leader has.", lambda overview: overview.load.queued),
        gauge(
            "furrow_queued_tokens", "Prompt tokens of requests that wait.", lambda overview: overview.load.queued_tokens
        ),
        gauge(
            "furrow_expected_wait_seconds",
            "Time until a new request is claimed; absent where too little was seen to tell.",
            lambda overview: None if overview.load.expected_wait_ms is None else overview.load.expected_wait_ms / 1000,
        ),
        gauge("furrow_replicas_wanted", "Replicas that the operator wants.", _wanted),
        gauge("furrow_replicas_serving", "Replicas that serve.", lambda overview: _in_state(overview, "loaded")),
        gauge("furrow_replicas_failed", "Replicas that a host has given up.", _failed),
        gauge("furrow_replicas_unplaced", "Wanted replicas that no host has, or has room for.", _unplaced),
        gauge(
            "furrow_model_paused", "1 while leaders claim no request of the model.", lambda overview: overview.paused
        ),
        gauge(
            "furrow_dead_letters",
            "Requests that crashed their group when they ran alone.",
            lambda overview: dead[overview.model],
        ),
        counter("furrow_requests_enqueued", "Requests that came.", lambda overview: overview.load.enqueued),
        counter("furrow_requests_ended", "Requests that ended, in any way.", lambda overview: overview.load.ended),
        counter("furrow_epochs", "Epochs that a leader has begun.", lambda overview: overview.load.epochs),
        poisons,
    ]


def _in_state(overview: model_overviews.Overview, state: model_overviews.ReplicaState) -> int:
    return sum(replica.state == state for replica in overview.replicas)


def _wanted(overview: model_overviews.Overview) -> int:
    """0 for a model that is being unloaded."""
    return 0 if overview.state in ("draining", "unloading") else overview.wanted


def _failed(overview: model_overviews.Overview) -> int:
    return sum(replica.state == "failed" and replica.placed for replica in overview.replicas)


def _unplaced(overview: model_overviews.Overview) -> int:
    return max(0, _wanted(overview) - sum(replica.placed for replica in overview.replicas))


# An agent's /metrics and /health, and the folder in which the ranks of its host count.


ADDRESS_KEY = "metrics"
"""The key under which the supervisor stores the server's address for the next agent."""


class Records(Protocol):
    """The records that a host's supervisor keeps for its agents."""

    records: dict[str, Any]

    def keep(self, key: str, value: Any) -> None: ...


class MeasuredAgent(Protocol):
    """The agent, for threads of the server."""

    @property
    def plans(self) -> bool: ...

    def places(self) -> list[Place]: ...

    def health(self) -> dict[str, Any]: ...


class HostMetrics:
    """Made before the agent says that it is ready, so that a port in use ends a first agent for good."""

    def __init__(self, supervisor: Records, setting: str | None) -> None:
        """`setting`: HOST:PORT or `off`; None: the default address, or a free port where that is in use.

        Raises SettingsError for a value that is no address, and for a port in use that was asked for; an agent that
        follows another one goes on without metrics then.
        """
        self._supervisor = supervisor
        self._setting = setting
        self._registry = CollectorRegistry()
        self._agent: MeasuredAgent | None = None
        self._server: MetricsServer | None = None
        address = parse_address(setting or DEFAULT_ADDRESS)
        if address is not None:
            self._server = self._listen(*address)

    def start(self, agent: MeasuredAgent, client: SyncRedis) -> None:
        """Serve the metrics of `agent`. `client`: one of their own."""
        self._agent = agent
        folder = Path(os.environ[FOLDER_VARIABLE])
        self._supervisor.keep(FOLDER_KEY, str(folder))
        if self._server is None:
            return
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(RankCollector(folder, agent.places))
        self._registry.register(FarmCollector(client, lambda: agent.plans))
        self._server.start()
        self._supervisor.keep(ADDRESS_KEY, self._server.address)
        log.info("metrics", url=f"http://{self._server.address}/metrics", action="metrics_start")

    def _listen(self, host: str, port: int) -> MetricsServer | None:
        """At the address of the agent before this one, else at the chosen one. Raises SettingsError."""
        previous = self._supervisor.records.get(ADDRESS_KEY)
        host, port = (parse_address(previous) if previous is not None else None) or (host, port)
        try:
            return MetricsServer(host, port, self._registry, self._health)
        except OSError as error:
            if self._setting is None and error.errno == errno.EADDRINUSE:
                return MetricsServer(host, 0, self._registry, self._health)
            text = f"--metrics: can't listen on {host}:{port}: {error.strerror}; choose another HOST:PORT, or `off`"
            if not self._supervisor.records:
                raise SettingsError(text) from error
            log.warning("no metrics", error=text, action="metrics_start")
            return None

    def _health(self) -> dict[str, Any]:
        return {"ok": False} if self._agent is None else self._agent.health()
