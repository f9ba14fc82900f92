"""The private farm to strike: its server, one agent with its ranks, and two API processes."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil

from control import keys
from control.listening import free_port
from control.messages import ModelSpec
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from ops.chaos.system.proxy import Proxy
from ops.chaos.system.servers import ServerProcess
from ops.chaos.system.topologies import ClusterTopology, SentinelTopology, cluster, sentinel
from ops.chaos.system.view import View
from ops.harness.farm import HOST
from ops.local.supervisor import Part, Supervisor

TOPOLOGIES = ("server", "sentinel", "cluster")
APIS = 2
LOG_ENTRIES = 300_000


class Target(View):
    """A private farm of one model on this machine. Use from one thread that lives as long: its children die with it.

    `redis_url` is what the farm's processes are told; `client` goes straight to the server.
    """

    def __init__(
        self,
        spec: ModelSpec,
        server: ServerProcess | SentinelTopology | ClusterTopology,
        client: SyncRedis,
        redis_url: str,
        supervisor: Supervisor,
        log: Path,
        proxy: Proxy | None = None,
        keep_s: int = 0,
    ) -> None:
        """API processes keep requests for `keep_s` after their end."""
        self.ports = [free_port(HOST, 0) for _ in range(APIS)]
        super().__init__(spec, client, [(HOST, port) for port in self.ports])
        self.server, self.redis_url = server, redis_url
        self.shard_key = keys.ModelKeys(spec.name).bell
        """A key of the model, by which a Cluster's shard is found."""
        self.proxy = proxy
        """The lossy proxy between the farm and the server; None if there is none."""
        self.log = log
        """The log of the farm's processes."""
        self.logits: Path | None = None
        """The folder in which leaders note hashes of their logits, where they do."""
        self.log_entries = LOG_ENTRIES
        """For `large-log`: logged when the leader is killed."""
        self._supervisor = supervisor
        self._worker = Part("worker", "worker.agent.supervision", [])
        arguments = ["--host", HOST, "--grace", "5", "--keep-requests", str(keep_s), "--port"]
        self._apis = [Part(f"api {index + 1}", "api", [*arguments, str(p)]) for index, p in enumerate(self.ports)]

    def start(self) -> None:
        """Start every part and wait until the model is served. Raises ChaosError."""
        catalog.put_spec(self.client, self.spec)
        for part in (self._worker, *self._apis):
            self._supervisor.start(part)
        self.wait_until_whole()

    def tend(self) -> None:
        """Restart parts that died, as `furrow serve` does."""
        self._supervisor.tend()

    def restart_worker(self, **environment: str) -> None:
        """Stop the host's supervisor with its ranks, and start it with more environment."""
        self._supervisor.environment.update(environment)
        old = self._worker.process
        assert old is not None
        old.terminate()
        self.until(lambda: self._worker.process not in (old, None), "the worker runs again", 120.0)

    # --- processes --------------------------------------------------------------------------------------------------

    def _children(self) -> dict[str, int]:
        """The living processes of the host's supervisor, by name. A process that was just started has no name yet."""
        if self._worker.process is None:
            return {}
        found: dict[str, int] = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._worker.process.pid).children():
                with suppress(psutil.NoSuchProcess):  # it ended while it was looked at
                    if child.status() != psutil.STATUS_ZOMBIE:
                        found[child.name()] = child.pid
        return found

    @property
    def engine_pid(self) -> int | None:
        """The external engine's process; None between its death and its next start."""
        holder = self._children().get("furrow-engine")
        with suppress(psutil.NoSuchProcess):
            return None if holder is None else next((one.pid for one in psutil.Process(holder).children()), None)
        return None

    @property
    def agent_pid(self) -> int | None:
        """None between its death and its next start."""
        return self._children().get("furrow-agent")

    def api_pid(self, index: int) -> int | None:
        """None between its death and its next start."""
        process = self._apis[index].process
        return process.pid if process is not None else None

    def rank_pids(self) -> dict[int, int]:
        """The rank processes that live now, in whatever phase."""
        return {
            int(name.rpartition("-")[2]): pid
            for name, pid in self._children().items()
            if name.startswith("furrow-rank-")
        }


@contextmanager
def private_target(
    spec: ModelSpec,
    folder: Path,
    log_file: Path,
    environment: Mapping[str, str] | None = None,
    topology: str = "server",
    keep_s: int = 0,
) -> Generator[Target]:
    """A running target whose data lie in `folder`; all of it is stopped at the end.

    `environment` is its processes' own, `topology` one of TOPOLOGIES, `keep_s` as in Target; the lossy proxy stands
    before one server only.
    """
    with ExitStack() as stack:
        log = stack.enter_context(log_file.open("ab"))
        proxy: Proxy | None = None
        if topology == "server":
            server = stack.enter_context(private_server(folder))
            client = server.direct
            proxy = Proxy((HOST, server.port))
            proxy.start()
            stack.callback(proxy.stop)
        else:
            server = stack.enter_context(sentinel() if topology == "sentinel" else cluster(replicas=1))
            client = stack.enter_context(closing(connect(server.url)))
        url = proxy.url if proxy is not None else server.url
        level = os.environ.get("FURROW_LOG_LEVEL") or "info"
        parts = {"FURROW_REDIS_URL": url, "FURROW_LOG_LEVEL": level, "OMP_NUM_THREADS": "1"}
        supervisor = Supervisor({**parts, **(environment or {})}, lambda line: None, log)
        stack.callback(supervisor.stop)
        target = Target(spec, server, client, url, supervisor, log_file, proxy, keep_s)
        target.start()
        yield target


@contextmanager
def private_server(folder: Path) -> Generator[ServerProcess]:
    """One server, its data in `folder`."""
    server = ServerProcess(folder / "data")
    try:
        server.start()
        yield server
    finally:
        server.stop()
