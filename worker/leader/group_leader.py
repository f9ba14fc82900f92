"""Rank 0 of a group: it forms the group of each epoch, and serves with it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec
import structlog

from control.commands import LoadDenseShard
from control.errors import GroupError, SettingsError
from control.messages import Assignment, ModelAssets
from control.records import catalog
from control.records.backend import Backend, backend_of
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health
from control.replicas.lease import Lease
from worker.leader.crash_isolation import CrashIsolation
from worker.leader.exchange import DeadReplicas, Exchange, RedisCalls
from worker.leader.group import Group
from worker.leader.leader import Leader
from worker.leader.scheduled_requests import ScheduledRequests
from worker.leader.serving import (
    LEAST_TOKENS,
    ChunkSize,
    KvShare,
    Serving,
    ServingContext,
)
from worker.native.host import thread_count
from worker.rank.counters import Counters
from worker.rank.heartbeat import Heartbeat, Progress
from worker.rank.rank_worker import RankWorker
from worker.repository.fingerprint import fingerprints
from worker.repository.pooling import is_in_one_row, pooling_of
from worker.repository.validation import ModelFiles
from worker.sampling.grammars import Grammars, vocabulary_of
from worker.sampling.sampler import StepSampler
from worker.sampling.vectors import VectorSampler
from worker.scheduling.kv_cache import BLOCK_TOKENS
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Finisher

log = structlog.get_logger()

NOT_DETERMINISTIC = (
    "--deterministic: the order of sums of this replica depends on the batch ({}). Serve a model whose forward is C++, "
    "in float32, on at most 2 ranks or with all on one host; or leave --deterministic out."
)


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


class GroupLeader(Leader):
    """The leader of a group of ranks. Weights are loaded once; epochs come and go."""

    def __init__(
        self,
        clients: tuple[SyncRedis, SyncRedis, SyncRedis],
        assignment: Assignment,
        owner: str,
        files: ModelFiles,
        assets: ModelAssets,
        rank_worker: RankWorker,
        address: str,
        counters: Counters | None = None,
    ) -> None:
        spec = assignment.spec
        self._stored, packed = fingerprints(files, spec.dtype, spec.quant, spec.dequantize)
        super().__init__(clients, assignment, owner, packed, rank_worker.world_size, counters)
        self._files = files
        self._assets = assets
        self._rank_worker = rank_worker
        self._address = address
        self._limits = limits_on(rank_worker.device)
        vocabulary = vocabulary_of(assets)
        self._decode = vocabulary.decode
        self._grammars = Grammars(vocabulary.for_grammars, assets.eos_ids)
        self._pooling = pooling_of(files.config)
        self._chunk_size = ChunkSize(self._limits.least_chunk)
        self._backend: Backend | None = None
        self._share: KvShare | None = None
        self._kv_at_most = assignment.kv_tokens is not None
        self._shares = assignment.shares
        is_chosen = assignment.kv_tokens is not None or spec.kv_tokens is None
        if is_chosen and rank_worker.device == "cpu":  # a GPU's pages are allocated for good
            self._share = KvShare(owner.rpartition("/")[0], spec.name, self._replica)

    def _serve(self, lease: Lease) -> None:
        worker = self._rank_worker
        client = self._heartbeat_client
        progress = Progress(worker, self._counters)
        if self._share is not None:  # it may have fallen since this process was started
            self._share.take(run(self._client, self._share.reading))
        place = lease.model, lease.replica, lease.epoch
        with worker.heartbeat(client, *place, progress, lease, self._share) as heartbeat:
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
        whole = self._pooling is not None and is_in_one_row(self._files.config, self._pooling)
        scheduler = Scheduler(
            kv_tokens=kv_tokens,
            token_budget=max(self._limits.token_budget, WHOLE_TOKENS * thread_count() if whole else 0),
            max_sequences=self._limits.max_sequences,
            cost=store.cost,
            prefix_tokens=BLOCK_TOKENS if shares_prefixes else None,
            lookup=self._spec.lookup if group.verifies_guesses else 0,
            whole_prompts=whole,
            whole_images=images is not None and images.whole,
        )
        calls = RedisCalls(self._client, self._blocking, lease, heartbeat.check, self._rank_worker.world_size)
        exchange = Exchange(lease, calls, DeadReplicas(self._client, lease))
        finisher = Finisher(self._decode)
        fingerprint = None if self._backend is None else self._backend.fingerprint
        isolation = CrashIsolation(lease, calls.run)
        running = ScheduledRequests(scheduler, finisher, self._grammars, isolation, images, fingerprint, self._counters)
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
        self._run_loop(Serving(context), exchange, lease, finish=group.shutdown)

    def _quit(self) -> None:
        self._rank_worker.leave()

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
            kv_type=self._spec.kv_type,
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
        longest = self._rank_worker.store.cost.longest(kv_tokens, self._assets.context_length)
        assets = self._assets.with_kv(kv_tokens, longest)
        if self._rank_worker.images is None:
            assets = msgspec.structs.replace(assets, images=None)
        if self._share is not None:
            self._share.assets = assets
        words = [
            *self._records(self._backend),
            catalog.put_assets(name, assets),
            health.note_formation(name, self._replica, formation),
        ]
        run_every(self._client, words)
