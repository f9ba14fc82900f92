"""The farm that is struck: one seen from outside by its state in Redis, or a private one with a server, one agent with
its ranks, and two API processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil

from control import keys
from control.errors import RedisUnavailable
from control.listening import free_port
from control.messages import ModelSpec
from control.placement import membership
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect, run
from control.replicas import health, model_overviews
from control.replicas.health import Beat, Poison
from control.replicas.model_overviews import Overview
from ops.chaos.errors import ChaosError, NoEffect
from ops.chaos.system.proxy import Proxy
from ops.chaos.system.servers import ServerProcess
from ops.chaos.system.topologies import ClusterTopology, SentinelTopology, cluster, sentinel
from ops.common.waiting import NotInTime, until
from ops.harness.farm import HOST
from ops.local.ready import is_ready
from ops.local.supervisor import Part, Supervisor

TICK_S = 0.01
WHOLE_WITHIN_S = 240.0
EFFECT_WITHIN_S = 30.0
PROVED_WITHIN_S = 180.0
"""A rank that must start anew imports for seconds, on a machine that is far too busy for a minute."""

T = TypeVar("T")


class View:
    """A farm that this process did not start; `addresses` are those of its API processes."""

    def __init__(self, spec: ModelSpec, client: SyncRedis, addresses: list[tuple[str, int]]) -> None:
        self.spec = spec
        self.client = client
        self.addresses = addresses
        self.replica = "r0"
        """The one that is struck. Of two that a fault starts either one may stay."""

    @property
    def urls(self) -> list[str]:
        """Of its API processes."""
        return [f"http://{host}:{port}" for host, port in self.addresses]

    def tend(self) -> None:
        """A duty that `until` calls at each poll."""

    # --- waiting ----------------------------------------------------------------------------------------------------

    def until(
        self, condition: Callable[[], T | None], event: str, seconds: float = EFFECT_WITHIN_S, tick: float = TICK_S
    ) -> T:
        """The first true value of `condition`; a server that can't be reached counts as not yet.

        Raises ChaosError naming `event`.
        """

        def attempt() -> T | None:
            self.tend()
            with suppress(RedisUnavailable):
                return condition()
            return None

        try:
            return until(attempt, event, seconds, tick)
        except NotInTime as error:
            raise ChaosError(str(error)) from error

    def proved(
        self, condition: Callable[[], T | None], event: str, seconds: float = PROVED_WITHIN_S, tick: float = TICK_S
    ) -> T:
        """Wait for the proof of an effect: as `until`, but raises NoEffect."""
        try:
            return self.until(condition, event, seconds, tick)
        except ChaosError as error:
            raise NoEffect(str(error)) from error

    def rest(self, seconds: float) -> None:
        """Let the farm run on for a while."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "the end of a rest", seconds + 1.0)

    def whole(self) -> bool:
        """Every rank is ready in the current epoch, and every API process answers."""
        return self.overview().state == "loaded" and all(map(is_ready, self.addresses))

    def wait_until_whole(self, *, standby: bool = False) -> None:
        """`standby`: also until the host has a process ready to take the next dead rank's place."""

        def there() -> bool:
            if (overview := self.overview()).state == "failed":
                raise ChaosError(f"{self.spec.name} was given up: {overview.detail}")
            return self.whole() and (not standby or self.standby_state() == "ready")

        try:
            self.until(there, "the farm is whole again", WHOLE_WITHIN_S)
        except ChaosError as error:
            with suppress(RedisUnavailable):
                raise ChaosError(f"{error}: {self.overview().state}: {self.overview().detail}") from error
            raise

    # --- the state of the farm -------------------------------------------------------------------------------------

    def overview(self) -> Overview:
        return model_overviews.overview(self.client, self.spec.name)

    def epoch(self) -> int:
        return health.read_epoch(self.client, self.spec.name, self.replica)

    def beat(self, rank: int) -> Beat | None:
        return health.heartbeats(self.client, self.spec.name, self.replica, self.spec.tp)[rank]

    def poisons(self) -> list[Poison]:
        """The poison of past epochs, newest first."""
        return run(self.client, health.poison_history(self.spec.name, self.replica))

    def standby_state(self) -> str | None:
        """off, starting or ready; None where no host beats."""
        return next(iter(membership.standbys(self.client)), None)

    # --- processes --------------------------------------------------------------------------------------------------

    def rank_pids(self) -> dict[int, int]:
        """The ranks that beat and whose processes live on this machine."""
        beats = health.heartbeats(self.client, self.spec.name, self.replica, self.spec.tp)
        return {rank: beat.pid for rank, beat in enumerate(beats) if beat is not None and lives_as(rank, beat.pid)}

    def rank_pid(self, rank: int) -> int:
        """The rank's process; waits if it is just being started."""
        return self.until(lambda: self.rank_pids().get(rank), f"rank {rank} has a process", WHOLE_WITHIN_S)

    def send(self, pid: int, number: signal.Signals) -> None:
        """As `kill`; a process that has just ended is no error here, because the proof will be missing."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def lives_as(rank: int, pid: int) -> bool:
    """True if the process exists on this machine and has the name of that rank."""
    try:
        process = psutil.Process(pid)
        return process.name() == f"furrow-rank-{rank}" and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# --- a private farm ---------------------------------------------------------------------------------------------------


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
        self.server = server
        self.redis_url = redis_url
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
        children: dict[str, int] = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._worker.process.pid).children():
                with suppress(psutil.NoSuchProcess):  # it ended while it was looked at
                    if child.status() != psutil.STATUS_ZOMBIE:
                        children[child.name()] = child.pid
        return children

    @property
    def engine_pid(self) -> int | None:
        """The external engine's process; None between its death and its next start."""
        holder = self._children().get("furrow-engine")
        with suppress(psutil.NoSuchProcess):
            return None if holder is None else next((child.pid for child in psutil.Process(holder).children()), None)
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
