"""The farm that is struck: its own server, one agent with its ranks, and two API processes, all known by their pids."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil

from control import catalog, farm, health, keys
from control.cli.serve import free_port, is_ready
from control.cli.supervisor import Part, Supervisor
from control.clients import SyncRedis
from control.connection import read, run
from control.errors import RedisUnavailable
from control.health import Beat, Overview, Poison
from control.messages import ModelSpec
from ops.chaos.errors import ChaosError
from ops.chaos.proxy import Proxy
from ops.chaos.replicated import Replicated, replicated
from ops.chaos.server import ServerProcess

HOST = "127.0.0.1"
TICK_S = 0.01
WHOLE_WITHIN_S = 120.0
EFFECT_WITHIN_S = 30.0
APIS = 2
REPLICA = "r0"

T = TypeVar("T")


class Target:
    """A private farm of one model on this machine. Use from one thread that lives as long: its children die with it.

    `redis_url` is what the farm's processes are told; `client` goes straight to the server.
    """

    def __init__(
        self,
        spec: ModelSpec,
        server: ServerProcess | Replicated,
        redis_url: str,
        supervisor: Supervisor,
        log: Path,
        proxy: Proxy | None = None,
    ) -> None:
        self.spec, self.server, self.redis_url = spec, server, redis_url
        self.proxy = proxy
        """The lossy way to the server that the farm goes; None where it goes straight."""
        self.log = log
        """What the farm's processes write."""
        self.client: SyncRedis = server.client
        self._supervisor = supervisor
        self._agent = Part("agent", "worker", ["agent"])
        self.ports = [free_port(HOST, 0) for _ in range(APIS)]
        arguments = ["--host", HOST, "--grace", "5", "--port"]
        self._apis = [Part(f"api {index + 1}", "api", [*arguments, str(p)]) for index, p in enumerate(self.ports)]

    @property
    def urls(self) -> list[str]:
        """Of both API processes."""
        return [f"http://{HOST}:{port}" for port in self.ports]

    def start(self) -> None:
        """Start every part and wait until the model is served. Raises ChaosError."""
        catalog.put_spec(self.client, self.spec)
        for part in (self._agent, *self._apis):
            self._supervisor.start(part)
        self.wait_until_whole()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], T], what: str, seconds: float = EFFECT_WITHIN_S, tick: float = TICK_S) -> T:
        """The first true value of `condition`; whatever part died meanwhile is started again, as under `furrow serve`.

        A server that can't be reached counts as not yet. Raises ChaosError naming `what`.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._supervisor.tend()
            try:
                if value := condition():
                    return value
            except RedisUnavailable:
                pass
            if time.monotonic() > deadline:
                raise ChaosError(f"not within {seconds:.0f} s: {what}")
            time.sleep(tick)

    def rest(self, seconds: float) -> None:
        """Let the farm run on for a while."""
        until = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until, "the end of a rest", seconds + 1.0)

    def whole(self) -> bool:
        """Every rank is ready in the current epoch, and both API processes answer."""
        return self.overview().state == "loaded" and all(is_ready((HOST, port)) for port in self.ports)

    def wait_until_whole(self, *, standby: bool = False) -> None:
        """`standby`: also until the host has a process ready to take the next dead rank's place."""

        def there() -> bool:
            return self.whole() and (not standby or self.standby_state() == "ready")

        self.until(there, f"the farm is whole again: {self.overview().detail}", WHOLE_WITHIN_S)

    # --- what the farm says of itself -------------------------------------------------------------------------------

    def overview(self) -> Overview:
        return health.overview(self.client, self.spec.name)

    def epoch(self) -> int:
        return health.read_epoch(self.client, self.spec.name, REPLICA)

    def beat(self, rank: int) -> Beat | None:
        return health.heartbeats(self.client, self.spec.name, REPLICA, self.spec.tp)[rank]

    def poisons(self) -> list[Poison]:
        """How epochs ended that were poisoned, newest first."""
        return run(self.client, health.poison_history(self.spec.name, REPLICA))

    def standby_state(self) -> str | None:
        """off, starting or ready; None where no host beats."""
        hosts = farm.known_hosts(self.client)
        said = [run(self.client, read("HGET", keys.host(host), "standby", parse=lambda word: word)) for host in hosts]
        return next((word for word in said if word), None)

    # --- processes --------------------------------------------------------------------------------------------------

    @property
    def agent_pid(self) -> int | None:
        """None between its death and its next start."""
        return self._agent.process.pid if self._agent.process is not None else None

    def api_pid(self, index: int) -> int | None:
        """None between its death and its next start."""
        process = self._apis[index].process
        return process.pid if process is not None else None

    def rank_pids(self) -> dict[int, int]:
        """The rank processes that live now, in whatever phase: children of the agent, by the name they give themselves.

        One that has only just been started has no name yet.
        """
        if self.agent_pid is None:
            return {}
        found: dict[int, int] = {}
        try:
            for child in psutil.Process(self.agent_pid).children():
                name = child.name()
                if name.startswith("furrow-rank-") and child.status() != psutil.STATUS_ZOMBIE:
                    found[int(name.rpartition("-")[2])] = child.pid
        except psutil.NoSuchProcess:  # one of them ended while it was looked at
            return self.rank_pids()
        return found

    def rank_pid(self, rank: int) -> int:
        """The rank's process, waited for if it is just being started."""
        return self.until(lambda: self.rank_pids().get(rank), f"rank {rank} has a process", WHOLE_WITHIN_S)

    def send(self, pid: int, number: signal.Signals) -> None:
        """As `kill` does; a process that has just ended by itself is no error here: its proof will be missing."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def private_target(
    spec: ModelSpec,
    folder: Path,
    log_file: Path,
    topology: str = "server",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Target]:
    """A running target whose data lie in `folder`; all of it is stopped at the end.

    `topology`: one of TOPOLOGIES; a single server is reached through the lossy proxy. `environment` is the farm's own.
    """
    with ExitStack() as stack:
        log = stack.enter_context(log_file.open("ab"))
        server = stack.enter_context(
            private_server(folder) if topology == "server" else replicated(topology, keys.ModelKeys(spec.name).bell)
        )
        proxy = stack.enter_context(before(server)) if isinstance(server, ServerProcess) else None
        url = proxy.url if proxy is not None else server.url
        level = os.environ.get("FURROW_LOG_LEVEL") or "info"
        parts = {"FURROW_REDIS_URL": url, "FURROW_LOG_LEVEL": level, "OMP_NUM_THREADS": "1"}
        supervisor = Supervisor({**parts, **(environment or {})}, lambda line: None, log)
        stack.callback(supervisor.stop)
        target = Target(spec, server, url, supervisor, log_file, proxy)
        target.start()
        yield target


@contextmanager
def private_server(folder: Path) -> Iterator[ServerProcess]:
    """One server, its data in `folder`."""
    server = ServerProcess(folder / "data")
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def before(server: ServerProcess) -> Iterator[Proxy]:
    """The lossy way to `server`."""
    proxy = Proxy((HOST, server.port))
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
