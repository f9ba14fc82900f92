"""The /metrics of a host: the counters of its ranks, the host's own series and those of the farm."""

from __future__ import annotations

import errno
import gzip
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import psutil
import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
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
from worker.rank.counters import FOLDER_KEY, FOLDER_VARIABLE, SUFFIX, Counters, Labels, read_counters
from worker.rank.series import ALL, Series

log = structlog.get_logger()


# --- Counters of ranks -----------------------------------------------------------------------------------------------

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
        who = [labels.model, labels.replica, *([str(labels.rank)] if series.rank else [])]
        cells = counters.read(series)
        if series.kind == "histogram":
            family.add_metric(who, _buckets(series, cells), sum_value=cells[-1])
        elif series.kind == "counter" or psutil.pid_exists(counters.pid):
            for value, cell in zip(series.values, cells, strict=True):
                family.add_metric([*who, *([value] if series.label else [])], cell)
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


# --- Host series -----------------------------------------------------------------------------------------------------

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
    for name, own in facts.items():
        if name in alive or name not in drained:
            up.add_metric([name], name in alive)
        if own is None:
            continue
        version.add_metric([name, own.version], 1)
        clock.add_metric([name], own.clock_ms / 1000)
        trip.add_metric([name], own.round_trip_ms / 1000)
        for folder in ("models", "cache", "shared_memory"):
            space = getattr(own, folder)
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
    for one in overviews:
        for replica in one.replicas:
            for rank, beat in enumerate(replica.beats):
                if beat is not None:
                    values = [one.model, replica.replica, str(rank), beat.host]
                    age.add_metric(values, beat.oldest_pending_ms / 1000)
                    stalled.add_metric(values, beat.stalled_ms / 1000)
                    progress.add_metric(values, beat.progress)
                    slow.add_metric(values, rank in replica.slow)
    return [age, stalled, progress, slow]


# --- Farm series -----------------------------------------------------------------------------------------------------

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
        overviews = model_overviews.overviews(client)
        hosts = membership.living_hosts(client)
        letters = run_every(client, [count_letters(one.model) for one in overviews])
        facts = facts_of_all(client, membership.known_hosts(client))
        drained = membership.drained_hosts(client)
        used = _gauge("furrow_redis_used_bytes", "Memory that Redis uses.", "server")
        most = _gauge("furrow_redis_max_bytes", "Its maxmemory; 0: none is set.", "server")
        for server in server_memory(client):
            used.add_metric([server.address], server.used)
            most.add_metric([server.address], server.most)
        return [*_of_models(overviews, letters), *of_hosts(hosts, drained, facts), *of_ranks(overviews), used, most]


def _of_models(overviews: Sequence[model_overviews.Overview], letters: Sequence[int]) -> list[Metric]:
    """The series with a label for the model."""

    def gauge(name: str, text: str, value: Callable[[model_overviews.Overview], float | None]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        for one in overviews:
            if (number := value(one)) is not None:
                family.add_metric([one.model], number)
        return family

    def counter(name: str, text: str, value: Callable[[model_overviews.Overview], float]) -> Metric:
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


def _in_state(one: model_overviews.Overview, state: model_overviews.ReplicaState) -> int:
    return sum(replica.state == state for replica in one.replicas)


def _wanted(one: model_overviews.Overview) -> int:
    """0 for a model that is being unloaded."""
    return 0 if one.state in ("draining", "unloading") else one.wanted


def _failed(one: model_overviews.Overview) -> int:
    return sum(replica.state == "failed" and replica.placed for replica in one.replicas)


def _unplaced(one: model_overviews.Overview) -> int:
    return max(0, _wanted(one) - sum(replica.placed for replica in one.replicas))


# --- The metrics of an agent -----------------------------------------------------------------------------------------

# An agent's /metrics and /health, and the folder in which the ranks of its host count.


ADDRESS_KEY = "metrics"
"""The key under which the supervisor stores the server's address for the next agent."""


class Records(Protocol):
    """The records that a host's supervisor keeps for its agents."""

    records: dict[str, Any]

    def keep(self, key: str, value: Any) -> None: ...


class Measured(Protocol):
    """The agent, for threads of the server."""

    @property
    def plans(self) -> bool: ...

    def places(self) -> list[Place]: ...

    def health(self) -> dict[str, Any]: ...


class HostMetrics:
    """Made before the agent says that it is ready, so that a port in use ends a first agent for good."""

    def __init__(self, supervisor: Records, chosen: str | None) -> None:
        """`chosen`: HOST:PORT or `off`; None: the default address, or a free port where that is in use.

        Raises SettingsError for a value that is no address, and for a port in use that was asked for; an agent that
        follows another one goes on without metrics then.
        """
        self._supervisor = supervisor
        self._chosen = chosen
        self._registry = CollectorRegistry()
        self._agent: Measured | None = None
        self._server: MetricsServer | None = None
        address = parse_address(chosen or DEFAULT_ADDRESS)
        if address is not None:
            self._server = self._listen(*address)

    def start(self, agent: Measured, client: SyncRedis) -> None:
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
            if self._chosen is None and error.errno == errno.EADDRINUSE:
                return MetricsServer(host, 0, self._registry, self._health)
            text = f"--metrics: can't listen on {host}:{port}: {error.strerror}; choose another HOST:PORT, or `off`"
            if not self._supervisor.records:
                raise SettingsError(text) from error
            log.warning("no metrics", error=text, action="metrics_start")
            return None

    def _health(self) -> dict[str, Any]:
        return {"ok": False} if self._agent is None else self._agent.health()


# --- Server ----------------------------------------------------------------------------------------------------------

# The agent's HTTP server for /metrics and /health, on threads of its own.


DEFAULT_ADDRESS = "127.0.0.1:9464"
OFF = "off"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""For every client: prometheus_client 0.26 writes `vllm_` for `vllm:` as OpenMetrics, which Prometheus prefers."""
READ_LIMIT_S = 5.0
"""A client that does not send its request within this time is disconnected."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128
    """With socketserver's five, clients that connect at the same moment wait for a second or more."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is no error of this process."""


class _Handler(WSGIRequestHandler):
    timeout = READ_LIMIT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Write no line for each scrape."""

    def address_string(self) -> str:
        return str(self.client_address[0])


class MetricsServer:
    """Serves until the process ends."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], dict[str, Any]]) -> None:
        """`health`: the body of /health; without `ok` its status is 503. Raises OSError for a port in use."""
        self._health = health
        self._registry = registry
        self._server = make_server(host, port, self._answer, server_class=_Server, handler_class=_Handler)
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._stopping = False

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host}:{port}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop at once: a connection wakes the thread. `serve_forever` would look for its end every half second."""
        self._stopping = True
        address: Any = self._server.server_address
        with suppress(OSError):
            socket.create_connection(address, READ_LIMIT_S).close()
        self._thread.join()
        self._server.server_close()

    def _run(self) -> None:
        while not self._stopping:
            self._server.handle_request()

    def _answer(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environment.get("PATH_INFO", "")
        method = environment.get("REQUEST_METHOD", "")
        if method not in ("GET", "HEAD"):
            return _text(start, "405 Method Not Allowed", "Only GET is answered here.")
        if path == "/metrics":
            return self._metrics(environment, start)
        if path == "/health":
            body = self._health()
            status = "200 OK" if body.get("ok") else "503 Service Unavailable"
            start(status, [("content-type", "application/json")])
            return [json.dumps(body).encode()]
        return _text(start, "404 Not Found", "This agent serves /metrics and /health.")

    def _metrics(self, environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        body = generate_latest(self._registry)
        headers = [("content-type", CONTENT_TYPE)]
        if "gzip" in environment.get("HTTP_ACCEPT_ENCODING", ""):
            body, headers = gzip.compress(body, compresslevel=1), [*headers, ("content-encoding", "gzip")]
        start("200 OK", [*headers, ("content-length", str(len(body)))])
        return [body]


def _text(start: Callable[..., Any], status: str, words: str) -> list[bytes]:
    start(status, [("content-type", "text/plain; charset=utf-8")])
    return [f"{words}\n".encode()]


def parse_address(text: str) -> tuple[str, int] | None:
    """`HOST:PORT`, or None for `off`. Raises SettingsError."""
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:
        raise SettingsError(f"--metrics {text!r} is no address: use HOST:PORT such as {DEFAULT_ADDRESS}, or {OFF}")
    return host.removeprefix("[").removesuffix("]"), int(port)
