"""The leader of an external engine's replica: it waits for the engine, publishes the model, and serves with it.

The engine is a child of the host's supervisor, as this process is; the agent starts both, and starts either again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import structlog

from control.engines import ENGINES
from control.messages import Assignment, ModelAssets
from control.records import catalog
from control.records.backend import Backend
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas.lease import Lease
from worker.external.client import EngineClient
from worker.external.engine import Address
from worker.external.host import CLASSES
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.engine_sequences import EngineSequences
from worker.leader.engine_serving import EngineContext, EngineServing
from worker.leader.exchange import DeadReplicas, Exchange, RedisCalls
from worker.leader.leader import Leader
from worker.leader.running_requests import RunningRequests
from worker.rank.counters import Counters
from worker.rank.heartbeat import Heartbeat, NoGauges, Progress
from worker.sampling.grammars import vocabulary_of
from worker.scheduling.sequence import Finisher

log = structlog.get_logger()

LOOK_S = 0.1
"""Between two looks at an engine that loads its model."""


class EngineLeader(Leader):
    """The leader of one external engine."""

    def __init__(
        self,
        clients: tuple[SyncRedis, SyncRedis, SyncRedis],
        assignment: Assignment,
        owner: str,
        weights: str,
        assets: ModelAssets,
        address: Address,
        counters: Counters | None = None,
    ) -> None:
        """`weights`: the fingerprint of the model's files. `address`: where the engine listens, or will listen."""
        super().__init__(clients, assignment, owner, weights, 1, counters)
        spec = self._spec
        self._address = address
        self._engine = CLASSES[spec.engine](spec.name, list(spec.adapters))
        self._title = ENGINES[spec.engine].title
        self._version = ""
        self._most = self._engine.most_sequences(spec.engine_args)
        context = self._engine.context_length(spec.engine_args, spec.max_context) or assets.context_length
        context = min(context, assets.context_length)
        self._assets = msgspec.structs.replace(assets, context_length=context, kv_tokens=context * self._most)
        self._decode = vocabulary_of(assets).decode

    def _quit(self) -> None:
        pass

    def _serve(self, lease: Lease) -> None:
        progress = Progress(NoGauges(), self._counters)
        progress.phase = "loading"
        heartbeat = Heartbeat(
            self._heartbeat_client, lease.model, lease.replica, lease.epoch, 0, 1, self._spec.engine, progress, lease
        )
        with heartbeat, EngineClient(self._engine, self._address) as client:
            if self._await_engine(client, heartbeat.check):
                progress.phase = "ready"
                self._publish()
                self._work(lease, client, progress, heartbeat.check)

    def _await_engine(self, client: EngineClient, check: Callable[[], None]) -> bool:
        """Wait until the engine has loaded its model; False if the leader is stopped before. Raises EpochOver."""
        began = time.monotonic()
        while not client.is_ready():
            check()
            if self.signals.stopping or self.signals.draining:
                self.signals.stopping = True
                return False
            time.sleep(LOOK_S)
        models = client.known_models()
        if models and self._spec.name not in models:
            self._engine.model = models[0]  # a server that runs already has a name of its own
        self._version = client.version()
        seconds = round(time.monotonic() - began, 2)
        log.info(
            "the engine is ready",
            engine=self._spec.engine,
            version=self._version,
            seconds=seconds,
            action="engine_ready",
        )
        return True

    def _publish(self) -> None:
        run_every(self._client, [*self._records(self._backend), catalog.put_assets(self._spec.name, self._assets)])

    @property
    def _backend(self) -> Backend:
        spec = self._spec
        options = " ".join(
            [f"{name}={value}" for name, value in sorted(spec.engine_args.items())]
            + [f"adapter={name}" for name in spec.adapters]
        )
        return Backend(
            weights=self._weights,
            dtype=spec.engine_args.get("dtype", "auto"),
            quant=spec.engine_args.get("quantization"),
            dequantize=False,
            tp=spec.tp,
            collective="",
            kernels=[f"{spec.engine} {options}".strip()],
            batch_invariant=False,
            engine_version=self._version,
        )

    def _work(self, lease: Lease, client: EngineClient, progress: Progress, check: Callable[[], None]) -> None:
        calls = RedisCalls(self._client, self._blocking, lease, check)
        exchange = Exchange(lease, calls, DeadReplicas(self._client, lease))
        sequences = EngineSequences(
            self._engine,
            client,
            self._most,
            self._assets.context_length,
            self._assets.eos_ids,
            embeds=self._assets.kind == "embed",
        )
        isolation = CrashIsolation(lease, calls.run)
        running = RunningRequests(
            sequences, Finisher(self._decode), None, isolation, self._backend.fingerprint, self._counters
        )
        context = EngineContext(
            title=self._title,
            client=client,
            sequences=sequences,
            running=running,
            exchange=exchange,
            progress=progress,
            check=check,
            signals=self.signals,
            decode=self._decode,
        )
        self._run_loop(EngineServing(context), exchange, lease, finish=lambda: None)
