"""A farm without models or agents, for the console: hosts and replicas that beat as a test scripts them."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field

from control.errors import FurrowError
from control.messages import Assignment, ModelSpec
from control.placement import farm, membership
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect, run, run_every
from control.replicas import health
from control.replicas.lease import Lease, acquire, release, renew
from tests.byte_model import byte_assets
from tests.leader import ScriptedLeader
from tests.servers import Server

TICK_S = 0.25


@dataclass
class ScriptedReplica:
    """A replica whose ranks beat. A test changes its fields; `rate` is in tokens per second."""

    spec: ModelSpec
    host: str
    replica: str = "r0"
    rate: float = 0.0
    first_ms: int = 140
    """The time to the first token of each request."""
    kv_used: int = 0
    running: int = 0
    phase: str = "ready"
    percent: int = 0
    stuck: set[int] = field(default_factory=set[int])
    """Ranks that stand still in a long command, for which another rank is slow."""
    waits: set[int] = field(default_factory=set[int])
    """Ranks that spend their forwards on waiting for the others."""
    poison: tuple[int, str, str] | None = None
    """Rank, kind and message."""
    failure: str = ""
    _lease: Lease | None = None
    _turns: int = 0
    _tokens: float = 0.0
    _firsts: int = 0
    _firsts_ms: int = 0

    def publish(self, client: SyncRedis) -> None:
        """Put the model and the assignment of this replica into the catalog."""
        spec = self.spec
        if catalog.get_spec(client, spec.name) is None:
            catalog.put_spec(client, spec)
        if self.phase == "ready" and not self.failure:
            run(client, catalog.put_assets(spec.name, byte_assets(kv_tokens=65_536, context_length=8_192)))
        ranks = list(range(spec.tp))
        devices = spec.devices or [f"cuda:{rank}" for rank in ranks]
        farm.assign(client, self.host, Assignment(spec=spec, replica=self.replica, ranks=ranks, devices=devices))
        if self.failure:
            health.write_status(client, spec.name, self.replica, "failed", self.failure, host=self.host, tp=spec.tp)

    def tick(self, client: SyncRedis) -> None:
        """Renew the lock and send the heartbeats of all ranks."""
        if self.failure:
            return
        name = self.spec.name
        if self._lease is None:
            self._lease = run(client, acquire(name, self.replica, f"{self.host}/1", self.spec.tp))
        lease = self._lease
        if lease is None:
            return
        if self.poison is not None:
            health.write_poison(client, name, self.replica, lease.epoch, *self.poison)
            return
        self._turns += 1
        self._tokens += self.rate * TICK_S
        if self.rate > 0 and self._turns % 4 == 0:
            self._firsts += 1
            self._firsts_ms += self.first_ms
        beats = [health.beat(name, self.replica, rank, self._beat(lease, rank)) for rank in range(self.spec.tp)]
        run_every(client, [renew(lease, self.spec.tp), *beats])

    def _beat(self, lease: Lease, rank: int) -> health.Beat:
        leads = rank == 0
        return health.Beat(
            epoch=lease.epoch,
            seq=self._turns,
            oldest_pending_ms=4_000 if self.stuck else 12,
            progress=0 if rank in self.stuck else self._turns,
            forward_ms=4_000,
            waited_ms=3_900 if rank in self.waits else 1_000 - 900 * bool(self.waits),
            device=(self.spec.devices or [f"cuda:{one}" for one in range(self.spec.tp)])[rank],
            memory_bytes=9 << 30,
            phase=self.phase,
            read_bytes=self.percent * (17 << 30) // 100,
            weight_bytes=17 << 30 if self.percent else 0,
            pid=4_000 + rank,
            host=self.host,
            kv_used=self.kv_used if leads else 0,
            running=self.running if leads else 0,
            tokens=int(self._tokens) if leads else 0,
            first_tokens=self._firsts if leads else 0,
            first_tokens_ms=self._firsts_ms if leads else 0,
        )

    def forget(self) -> None:
        """Take another epoch with the next tick, as after a death of the leader."""
        self._lease = None

    def end(self, client: SyncRedis) -> None:
        if self._lease is not None:
            with suppress(FurrowError):
                run(client, release(self._lease))


class ScriptedFarm:
    """Hosts and replicas that beat until `stop`; `leader` answers requests of the model `tiny`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = connect(server.url)
        self.leader = ScriptedLeader(server.url)
        self.hosts: dict[str, Host] = {}
        self.replicas: list[ScriptedReplica] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted-farm", daemon=True)

    def start(self) -> None:
        self.leader.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self.leader.stop()
        for replica in self.replicas:
            replica.end(self.client)
        self.client.close()

    def host(self, name: str, *devices: str, alive: bool = True, memory: int | None = None) -> None:
        """Add a host; one that is not alive beat once, long ago. `memory`: bytes that its CPU ranks may have."""
        with self._lock:
            host = Host(name, devices, memory=memory)
            membership.beat_host(self.client, host, pid=77, memory_bytes=64 << 30)
            if alive:
                self.hosts[name] = host
            else:
                self.client.delete(f"furrow:host:{name}")

    def add(self, replica: ScriptedReplica) -> ScriptedReplica:
        with self._lock:
            replica.publish(self.client)
            self.replicas.append(replica)
        return replica

    def remove(self, replica: ScriptedReplica) -> None:
        """Take the replica, its model and its assignment away."""
        with self._lock:
            self.replicas.remove(replica)
            replica.end(self.client)
            farm.remove_assignment(self.client, replica.host, replica.spec.name, replica.replica)
            if (spec := catalog.get_spec(self.client, replica.spec.name)) is not None:
                catalog.forget(self.client, spec)

    def spec(self, name: str) -> ModelSpec:
        """The desired state of a model. Raises AssertionError for an unknown one."""
        model_spec = catalog.get_spec(self.client, name)
        assert model_spec is not None, name
        return model_spec

    def _run(self) -> None:
        while not self._stopping.wait(TICK_S):
            with self._lock:
                for host in self.hosts.values():
                    with suppress(FurrowError):
                        membership.beat_host(self.client, host, pid=77, memory_bytes=64 << 30)
                for replica in self.replicas:
                    try:
                        replica.tick(self.client)
                    except FurrowError:  # Redis is away, or the test has ended the epoch
                        replica.forget()


def populate(scripted: ScriptedFarm) -> None:
    """Two hosts and a model that serves on them; the states that need an operator come with `trouble`."""
    scripted.host("alpha", *(f"cuda:{index}" for index in range(4)))
    scripted.host("beta", "cuda:0", "cuda:1")
    large = ModelSpec(name="org/large-instruct", source="org/large-instruct", tp=4, replicas=1)
    scripted.add(ScriptedReplica(large, "alpha", rate=420.0, kv_used=41_000, running=6))


def trouble(scripted: ScriptedFarm) -> None:
    """A farm in trouble: a failed, a poisoned, a loading model, a slow rank, a lost host."""
    scripted.host("gamma", "cuda:0", alive=False)
    membership.drain(scripted.client, "beta")
    cause = "rank 1 ended with status 3: CUDA out of memory. Tried to allocate 2.31 GiB; use a smaller kv_tokens."
    scripted.add(ScriptedReplica(ModelSpec(name="org/too-large", source="org/too-large", tp=2), "beta", failure=cause))
    slow = ModelSpec(name="slow-8b", source="/models/slow-8b", tp=2, devices=["cpu", "cpu"], quant="int8")
    scripted.add(ScriptedReplica(slow, "beta", rate=3.0, running=2, kv_used=60_000, stuck={0}))
    ill = ModelSpec(name="wounded", source="/models/wounded", tp=2)
    scripted.add(
        ScriptedReplica(ill, "alpha", poison=(1, "illegal_address", "an illegal memory access was encountered"))
    )
    begun = ModelSpec(name="org/new-70b", source="org/new-70b", tp=4, replicas=2)
    scripted.add(ScriptedReplica(begun, "alpha", phase="loading", percent=43))
