"""Rank 0 of a replica: holds its lock, forms the group, serves, and starts over in a new epoch when one ends."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import msgspec
import structlog

from control import requests
from control.commands import LoadDenseShard
from control.errors import EpochOver, Fenced, GroupError, Lost, Poisoned, RedisUnavailable, SettingsError
from control.messages import Assignment, ModelAssets
from control.records import catalog
from control.records.backend import Backend, backend_of, put_backend
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.redis.outage import outage
from control.replicas import health
from control.replicas.lease import Lease, acquire, release
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.exchange import LOOP, BackgroundCall, DeadReplicas, Exchange, RedisCalls
from worker.leader.group import Group
from worker.leader.kv_share import KvShare
from worker.leader.running_requests import RunningRequests
from worker.leader.serving import (
    LEAST_TOKENS,
    PEER_FAILED,
    STEP_FAILED,
    ChunkSize,
    Serving,
    ServingContext,
    StopSignals,
)
from worker.native.host import thread_count
from worker.rank.counters import Counters
from worker.rank.heartbeat import Heartbeat, Progress
from worker.rank.rank_worker import RankWorker
from worker.repository.fingerprint import fingerprints
from worker.repository.pooling.description import pooling_of
from worker.repository.pooling.gate import is_whole
from worker.repository.validation import ModelFiles
from worker.sampling.grammars import Grammars
from worker.sampling.sampler import StepSampler
from worker.sampling.vectors import VectorSampler
from worker.sampling.vocabularies import vocabulary_of
from worker.scheduling.kv_cache import BLOCK_TOKENS
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Finisher

log = structlog.get_logger()

POLL_S = 0.05
"""Interval between attempts to take the lock."""
DISPLACED_S = 5.0
"""A lock that is held for longer is another leader's, not one that this host's last process left."""


NOT_DETERMINISTIC = (
    "--deterministic: the order of sums of this replica depends on the batch ({}). Serve a model whose forward is C++, "
    "in float32, on at most 2 ranks or with all on one host; or leave --deterministic out."
)


FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Of the pauses between epochs that end in their first step."""
WHOLE_TOKENS = 256
"""Tokens of a step for each thread, where threads compute sequences apart: with fewer their products are slower."""


@dataclass(frozen=True)
class LeaderLimits:
    """Sizes of a step."""

    token_budget: int = 512
    """Limit of prompt tokens in one step beside its decode rows."""
    least_chunk: int = LEAST_TOKENS
    """Smallest chunk of prompts beside decode rows, and the first chunk before a rate is known."""
    max_sequences: int = 256


GPU_LIMITS = LeaderLimits(token_budget=2048, least_chunk=512)
"""A GPU takes as long for one token as for some hundred: it launches the same kernels, and reads the same weights."""


def limits_on(device: str) -> LeaderLimits:
    """The sizes of a step of ranks on such a device."""
    return LeaderLimits() if device == "cpu" else GPU_LIMITS


class Backoff:
    """The pause before the next epoch when epochs keep ending in their first step: a fault that repeats must not spin.

    It doubles from epoch to epoch; one that completed a step, or ended for another reason, starts it over.
    """

    def __init__(self) -> None:
        self._fruitless = 0

    def after(self, *, steps: int, failed: bool) -> float:
        """Seconds to wait after an epoch that completed `steps` steps and ended in a step that `failed`."""
        if steps or not failed:
            self._fruitless = 0
            return 0.0
        pause = min(FIRST_PAUSE_S * 2**self._fruitless, LONGEST_PAUSE_S)
        self._fruitless += 1
        return pause


class Leader:
    """One leader process's life over all its epochs. Weights are loaded once; epochs come and go."""

    def __init__(
        self,
        clients: tuple[SyncRedis, SyncRedis, SyncRedis],
        assignment: Assignment,
        owner: str,
        files: ModelFiles,
        assets: ModelAssets,
        rank_worker: RankWorker,
        address: str,
        limits: LeaderLimits | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._counters = counters or Counters()
        self._client, self._blocking, self._heartbeat_client = clients
        self._spec = assignment.spec
        self._replica = assignment.replica
        self._owner = owner
        self._files = files
        self._assets = assets
        self._rank_worker = rank_worker
        self._address = address
        self._limits = limits or limits_on(rank_worker.device)
        vocabulary = vocabulary_of(assets)
        self._decode = vocabulary.decode
        self._grammars = Grammars(vocabulary.for_grammars, assets.eos_ids)
        self._pooling = pooling_of(files.config)
        self._share: KvShare | None = None
        self._kv_at_most = assignment.kv_tokens is not None
        self._shares = assignment.shares
        is_chosen = assignment.kv_tokens is not None or assignment.spec.kv_tokens is None
        if is_chosen and rank_worker.device == "cpu":  # a GPU's pages are allocated for good
            self._share = KvShare(owner.rpartition("/")[0], self._spec.name, self._replica)
        self._backoff = Backoff()
        self._chunk_size = ChunkSize(self._limits.least_chunk)
        self._steps = 0
        self._trying = False
        self._epoch = 0
        self._backend: Backend | None = None
        spec = self._spec
        self._stored, self._weights = fingerprints(files, spec.dtype, spec.quant, spec.dequantize)
        self.signals = StopSignals()

    def stop(self) -> None:
        """Let `run` return soon."""
        self.signals.stopping = True

    def run(self) -> None:
        """Serve until told to stop. Raises GroupError where the group can't be formed or the model not loaded."""
        while not self.signals.stopping:
            lease = self._acquire()
            if lease is None:
                return
            self._epoch = lease.epoch
            structlog.contextvars.bind_contextvars(epoch=lease.epoch)
            log.info("leads", world_size=self._rank_worker.world_size, action="begin_epoch")
            self._steps = 0
            self._trying = False
            pause = 0.0
            try:
                self._serve(lease)
            except RedisUnavailable as error:  # where nothing holds out for it the epoch ends, and the process stays
                log.warning("left the epoch", reason=str(error), action="leave_epoch")
            except EpochOver as over:
                log.warning("left the epoch", reason=str(over), action="leave_epoch")
                failed = isinstance(over, Poisoned) and over.kind in (STEP_FAILED, PEER_FAILED)
                # A trial that crashed is followed by a smaller one, so it can't go on for ever: no rest.
                pause = self._backoff.after(steps=self._steps, failed=failed and not self._trying)
            finally:
                self._leave(lease)
            self._rest(pause)

    def _rest(self, seconds: float) -> None:
        """Let a fault that repeats rest, without the lock, so that a healthier process may take it."""
        if seconds:
            log.warning("first step of the epoch failed", pause_s=seconds, action="back_off")
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.signals.stopping:
            time.sleep(POLL_S)

    def _acquire(self) -> Lease | None:
        """Wait for the lock; None when told to stop, or to drain while another leads for good."""
        waited = False
        begun = time.monotonic()
        while not self.signals.stopping:
            try:
                lease = run(
                    self._client,
                    acquire(
                        self._spec.name,
                        self._replica,
                        self._owner,
                        self._rank_worker.world_size,
                        floor=self._epoch,
                        weights=self._weights,
                    ),
                )
                outage.goes_on(LOOP)
                if lease is not None:
                    return lease
                if not waited:
                    log.info("waiting for the lock", action="acquire")
                    waited = True
                if self.signals.draining and time.monotonic() - begun > DISPLACED_S:
                    return None
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
            time.sleep(POLL_S)
        return None

    def _serve(self, lease: Lease) -> None:
        worker = self._rank_worker
        client = self._heartbeat_client
        progress = Progress(worker, self._counters)
        if self._share is not None:  # it may have fallen since this process was started
            self._share.take(run(self._client, self._share.reading))
        own = lease.model, lease.replica, lease.epoch
        with worker.heartbeat(client, *own, progress, lease, self._share) as heartbeat:
            ranks = Group(self._client, self._blocking, lease, worker, progress, heartbeat.check, self._address)
            try:
                with ranks as group:
                    kv_tokens, formation = group.form(self._load_command)
                    if self._share is not None:
                        kv_tokens = self._share.within(kv_tokens)
                    self._backend = self._backend_of(group)
                    self._check_deterministic()
                    self._publish(kv_tokens, formation)
                    self._work(lease, group, kv_tokens, progress, heartbeat)
            except GroupError as error:
                self._poison(lease, "load_failed", str(error))
                raise

    def _work(self, lease: Lease, group: Group, kv_tokens: int, progress: Progress, heartbeat: Heartbeat) -> None:
        store = self._rank_worker.store
        images = self._rank_worker.images
        shares_prefixes = self._spec.prefix_cache and store.supports_prefix_sharing
        whole = self._pooling is not None and is_whole(self._files.config, self._pooling)
        scheduler = Scheduler(
            kv_tokens=kv_tokens,
            token_budget=max(self._limits.token_budget, WHOLE_TOKENS * thread_count() if whole else 0),
            max_sequences=self._limits.max_sequences,
            block_tokens=store.block_tokens,
            prefix_tokens=BLOCK_TOKENS if shares_prefixes else None,
            lookup=self._spec.lookup if group.verifies_guesses else 0,
            state_tokens=store.state_tokens,
            whole_prompts=whole,
            whole_images=images is not None and images.whole,
        )
        calls = RedisCalls(self._client, self._blocking, lease, heartbeat.check, self._rank_worker.world_size)
        exchange = Exchange(lease, calls, DeadReplicas(self._client, lease))
        finisher = Finisher(self._decode)
        fingerprint = None if self._backend is None else self._backend.fingerprint
        isolation = CrashIsolation(lease, calls.run)
        running = RunningRequests(scheduler, finisher, self._grammars, isolation, images, fingerprint, self._counters)
        context = ServingContext(
            lease=lease,
            group=group,
            running=running,
            exchange=exchange,
            progress=progress,
            check=heartbeat.check,
            sampler=StepSampler(decode=self._decode) if self._pooling is None else VectorSampler(),
            chunk_size=self._chunk_size,
            images=images,
            signals=self.signals,
            share=self._share,
        )
        serving = Serving(context)
        counting = BackgroundCall[bool]("recount")
        try:
            with exchange:  # and before the poison, which Redis would refuse the last tokens for
                serving.adopt()
                counting.send(lambda: requests.recount(self._client, lease.model))
                serving.run()
                serving.give_back()  # to the queue, where the next epoch or another replica finds it
                group.shutdown()
                self.signals.stopping = True
        except EpochOver as over:
            if not isinstance(over, Fenced | Lost):
                self._poison(lease, getattr(over, "kind", "epoch_over"), str(over))
            raise
        finally:
            counting.close()
            self._steps = exchange.answers
            self._trying = serving.trying

    def _leave(self, lease: Lease) -> None:
        self._rank_worker.leave()
        try:
            run(self._client, release(lease))
        except RedisUnavailable as error:  # it lapses by itself
            outage.waits(LOOP, error)

    def _load_command(self, *, epoch: int, seq: int) -> LoadDenseShard:
        return LoadDenseShard(
            epoch=epoch,
            seq=seq,
            model_id=self._spec.name,
            config_json=json.dumps(self._files.config),
            safetensors_paths=[str(path) for path in self._files.weights],
            dtype=self._spec.dtype,
            quant=self._spec.quant,
            dequantize=self._spec.dequantize,
            kv_tokens=self._spec.kv_tokens,
            kv_at_most=self._kv_at_most,
            shares=self._shares,
        )

    def _backend_of(self, group: Group) -> Backend | None:
        spec = self._spec
        return backend_of(self._stored, spec.quant, spec.dequantize, [rank.backend for rank in group.loaded])

    def _check_deterministic(self) -> None:
        """Raises GroupError where other requests could change an answer although the model must not be served so."""
        backend = self._backend
        if self._spec.deterministic and not (backend is not None and backend.batch_invariant):
            described = "an older version" if backend is None else "; ".join((*backend.kernels, backend.collective))
            raise GroupError("load", SettingsError(NOT_DETERMINISTIC.format(described)), [])

    def _publish(self, kv_tokens: int, formation: health.Formation) -> None:
        """Write the model's assets to the catalog, from when on it counts as served, and what other replicas must know
        of this one before it claims."""
        name = self._spec.name
        assigned = catalog.Assigned(revision=self._spec.revision, tp=self._spec.tp)
        assets = msgspec.structs.replace(self._assets, kv_tokens=kv_tokens)
        if self._rank_worker.images is None:
            assets = msgspec.structs.replace(assets, images=None)
        if self._share is not None:
            self._share.assets = assets
        words = [
            catalog.put_replica(name, self._replica, assigned),
            catalog.put_weights(name, self._replica, self._weights),
            put_backend(name, self._replica, self._backend),
            catalog.put_assets(name, assets),
            health.note_formation(name, self._replica, formation),
        ]
        run_every(self._client, words)

    def _poison(self, lease: Lease, kind: str, message: str) -> None:
        try:
            health.write_poison(self._client, lease.model, lease.replica, lease.epoch, 0, kind, message)
        except RedisUnavailable as error:
            log.warning("could not publish the poison", error=str(error), action="poison")
