"""An agent's /metrics and /health, and the folder in which the ranks of its host count."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, Protocol

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from control.errors import SettingsError
from control.redis.clients import SyncRedis
from worker.agent.metrics.exposition import Place, RankCollector
from worker.agent.metrics.farm_series import FarmCollector
from worker.agent.metrics.server import DEFAULT_ADDRESS, MetricsServer, parse_address
from worker.rank.counters import FOLDER_KEY, FOLDER_VARIABLE

log = structlog.get_logger()

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
        self._supervisor, self._chosen = supervisor, chosen
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
