"""A rank's part of every command: the device, the weights, the KV memory and the collective. Rank 0 uses it inside the
leader, the others behind their mailbox."""

from __future__ import annotations

import atexit
import gc
import os
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
import structlog

from control.commands import (
    AnyCommand,
    Bye,
    ClearKvCache,
    Command,
    ErrorReply,
    GenerateStep,
    GenerateStepOk,
    GenerateStepWithImages,
    Init,
    InitOk,
    KvCacheCleared,
    LoadDenseShard,
    LoadDenseShardOk,
    NcclSanityCheck,
    NcclSanityResult,
    Ping,
    Pong,
    Reply,
    ShutdownRank,
    Unloaded,
    UnloadModel,
)
from control.errors import CollectiveFailed, RankError, RankErrorKind, collective_failure
from control.redis.clients import SyncRedis
from control.replicas.lease import Lease
from worker.collective import Collective, Solo, rendezvous
from worker.collective.base import Abort, sendable
from worker.collective.rendezvous import Store, all_ready
from worker.engine.images import EngineImages
from worker.engine.step import Engine, Step
from worker.kv.base import KVStore
from worker.kv.stores import store_for
from worker.models.backend import describe
from worker.models.loading import load, resolve_dtype
from worker.models.served import ServedModel
from worker.rank.heartbeat import Heartbeat, Progress, Share
from worker.repository.files import ModelFiles
from worker.repository.validation import context_length
from worker.selftest.choice import choose
from worker.weights.cache import WeightCache

if TYPE_CHECKING:
    from worker.collective.torch.process_group import ProcessGroupCollective  # it imports torch

log = structlog.get_logger()

LOADING_PATIENCE_S = 86_400.0
"""Time for which a rank on a GPU waits for the slowest to load; the leader ends a load without progress."""


def not_reached(epoch: int) -> Store:
    """The rendezvous of a group of one rank, which has none: raises RuntimeError."""
    raise RuntimeError("this rank was told of no place where the ranks of its group meet")


class RankWorker:
    """Executes commands on one device. Raises RankError for what a rank answers with `error`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: str,
        shared_memory: bool = True,
        weights: WeightCache | None = None,
        store_of: Callable[[int], Store] = not_reached,
    ) -> None:
        """`store_of`: epoch → where its ranks meet; a rank alone needs none."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._store_of = store_of
        self._shared_memory = shared_memory
        self._weights = weights
        self.abort = Abort()
        """The end of the epoch that this rank is in, or will be in next; any thread may report it."""
        self._model: ServedModel | None = None
        self._model_id: str | None = None
        self._shares: list[int] = []
        # `_read_bytes`: those of the checkpoint's `_weight_bytes` that have been read.
        self._loaded_in = 0
        self._read_bytes = 0
        self._weight_bytes = 0
        self._parts_done = 0
        self._loading = False
        self._engine: Engine | None = None
        self._requests: dict[int, str] = {}
        """The request of each running sequence, by sid."""
        self._collective: Collective | None = Solo() if world_size == 1 else None
        """The store of this epoch, in which ranks report that they have loaded."""
        self._handlers: dict[type[Command], Callable[..., Reply]] = {
            Ping: self._ping,
            Init: self._init,
            NcclSanityCheck: self._sanity_check,
            LoadDenseShard: self._load,
            GenerateStep: self._step,
            GenerateStepWithImages: self._step,
            ClearKvCache: self._clear,
            UnloadModel: self._unload,
            ShutdownRank: self._shutdown,
        }

    def answer(self, command: AnyCommand) -> Reply:
        """Execute `command`; what it refuses becomes an `error` reply, so that exactly one reply is always sent."""
        try:
            return self._handlers[type(command)](command)
        except RankError as error:
            # The reply carries words only; the chain of causes is here, whichever rank it was.
            cause = None if collective_failure(error) else error  # another rank's end says all in one line
            log.error(
                "refused a command",
                seq=command.seq,
                kind=error.kind,
                error=error.message,
                requests=self.requests,
                exc_info=cause,
                action="refuse_command",
            )
            log.debug("refusal of a command", exc_info=error, action="refuse_command")
            return self.refusal(command, error)

    def refusal(self, command: AnyCommand, error: RankError) -> ErrorReply:
        return ErrorReply(**self._head(command), kind=error.kind, message=error.message)

    def _head(self, command: Command) -> dict[str, int]:
        """The fields of every reply."""
        return {"epoch": command.epoch, "seq": command.seq, "rank": self.rank}

    def heartbeat(
        self,
        client: SyncRedis,
        model: str,
        replica: str,
        epoch: int,
        progress: Progress,
        lease: Lease | None = None,
        share: Share | None = None,
    ) -> Heartbeat:
        """The side thread of an epoch, which reports this rank's progress."""
        place = (self.rank, self.world_size, self.device)
        return Heartbeat(client, model, replica, epoch, *place, progress, lease, self.abort.say, share)

    def leave(self) -> None:
        """Leave the epoch: leave the group, forget every sequence, keep the weights."""
        self._requests.clear()
        if self._engine is not None:
            self._engine.leave()
        if self.world_size > 1:
            if self._collective is not None:
                self._collective.close()
            self._collective, self.abort = None, Abort()

    def _was_read(self, share: float) -> None:
        self._read_bytes = int(share * self._weight_bytes)
        self._parts_done += 1

    @property
    def progress(self) -> int:
        """A number that changes as this rank makes progress in a command; for any thread. It stands still while the
        rank waits for another one in a collective, or for a file."""
        model = self._model.progress if self._model is not None else 0
        forwards = self._engine.forwards if self._engine is not None else 0
        return self._parts_done + model + forwards + (progress_of_load() if self._loading else 0)

    @property
    def weights_read(self) -> tuple[int, int]:
        """Bytes of the checkpoint that were read, and all of them; for any thread."""
        return self._read_bytes, self._weight_bytes

    @property
    def waits(self) -> tuple[float, float]:
        """Seconds of this epoch's forwards, and those of them in which this rank waited for others; for any thread."""
        collective = self._collective or Solo()  # the main thread may leave the group meanwhile
        return collective.waits.read()

    @property
    def store(self) -> KVStore:
        """The cache of the loaded model; those of all ranks of a group count alike."""
        assert self._engine is not None, "no model is loaded"
        return self._engine.store

    @property
    def images(self) -> EngineImages | None:
        """The images of the running sequences; None where the model that is loaded takes text only."""
        return None if self._engine is None else self._engine.images

    @property
    def requests(self) -> list[str]:
        """The ids of the running requests, for log lines."""
        return sorted(set(self._requests.values()))

    def clear(self) -> None:
        self._requests.clear()
        if self._engine is not None:
            self._engine.clear()

    def step(self, command: GenerateStep) -> Step:
        """The command's forwards. Raises RankError where its model is not loaded."""
        if self._engine is None or self._model_id != command.model_id:
            raise RankError(self.rank, "model_not_loaded", f"no shard of {command.model_id!r} is loaded here")
        self._parts_done += 1
        change = command.change
        for sid in (*change.left, *change.kept):
            self._requests.pop(sid, None)
        self._requests.update(change.requests)
        return self._engine.step(command)

    # --- one handler per op -----------------------------------------------------------------------------------------

    def _ping(self, command: Ping) -> Pong:
        return Pong(
            **self._head(command),
            world_size=self.world_size,
            cuda_device=self.device,
            host=os.environ.get("FURROW_HOST_ID") or os.uname().nodename,
            network=rendezvous.namespace("net"),
        )

    def _init(self, command: Init) -> InitOk:
        if command.world_size != self.world_size:
            raise self._error("nccl_init_failed", f"world size {command.world_size}, expected {self.world_size}")
        try:
            self.join(command.epoch)
        except (RuntimeError, ValueError, CollectiveFailed) as error:
            raise self._error("nccl_init_failed", f"could not join the group: {error}") from error
        return InitOk(**self._head(command))

    def join(self, epoch: int, address: str = "127.0.0.1") -> None:
        """Join the group of `epoch`, and hand it to a model that is already loaded. At `address` other hosts reach this
        one."""
        self._collective = rendezvous.join(
            self._store_of(epoch), self.rank, self.world_size, self.device, self.abort, self._shared_memory, address
        )
        if self._model is not None and self._engine is not None:
            self._engine.join(self._collective)

    def _sanity_check(self, command: NcclSanityCheck) -> NcclSanityResult:
        try:
            ones = sendable(np.ones(1, np.float32), self.device)
            observed = float(self._joined("sanity check").all_reduce(ones)[0])
        except CollectiveFailed as error:
            raise self._error("nccl_init_failed", f"the sanity check failed: {error}") from error
        return NcclSanityResult(**self._head(command), observed_sum=observed)

    def _load(self, command: LoadDenseShard) -> LoadDenseShardOk:
        collective = self._joined("load")
        if self._model is None:
            self._loading = True
            try:
                files = ModelFiles.of_command(command.config_json, command.safetensors_paths)
                self._weight_bytes = files.weight_bytes
                dtype = resolve_dtype(command.dtype, str(self.device), files.config)
                choose(files.config, dtype.name, self.device, self.world_size, lambda: self._was_read(0.0))
                model = load(
                    files,
                    collective=collective,
                    dtype=command.dtype,
                    quant=command.quant,
                    dequantize=command.dequantize,
                    kv_type=command.kv_type,
                    device=self.device,
                    tell=self._was_read,
                    cache=self._weights,
                    shares=command.shares,
                )
                context = context_length(files.config)
                tokens = command.kv_tokens
                at_most = command.kv_at_most
                store = store_for(model.cache_layout, tokens, context, self.world_size, at_most=at_most)
            except Exception as error:
                self._all_loaded(False)
                raise self._error("load_failed", f"{type(error).__name__}: {error}") from error
            finally:
                self._loading = False
            # Libraries and model stay: a collector that looked through them would do so in the middle of a step.
            gc.freeze()
            atexit.register(gc.unfreeze)
            self._model = model
            self._model_id = command.model_id
            self._shares = command.shares
            self._engine = Engine(model, store, collective)
        elif self._model_id != command.model_id or self._loaded_in == command.epoch:
            raise self._error("already_loaded", f"{self._model_id!r} is loaded; unload it first")
        elif self._shares != command.shares:
            raise self._error("already_loaded", f"{self._model_id!r} is loaded with the shares {self._shares}")
        self._loaded_in = command.epoch
        assert self._engine is not None
        if self._all_loaded(True):
            self._engine.prepare()
        return LoadDenseShardOk(
            **self._head(command),
            kv_tokens=self._engine.store.capacity_tokens,
            weight_bytes=self._model.weight_bytes,
            verifies_guesses=self._engine.verifies_guesses,
            backend=describe(self._model),
            shares=self._shares,
        )

    def _all_loaded(self, loaded: bool) -> bool:
        """True if every rank of a group of GPUs has loaded: what prepares a step runs collectives, in which a rank
        would wait for one that failed. On a CPU there is nothing to prepare."""
        if self.world_size == 1 or not self.device.startswith("cuda"):
            return True
        store: Store = cast("ProcessGroupCollective", self._collective).store
        return all_ready(store, self.rank, self.world_size, loaded, LOADING_PATIENCE_S, self.abort.check)

    def _step(self, command: GenerateStep) -> GenerateStepOk:
        with self.step(command) as step:
            step.forward()
            while step.agree():
                step.forward()
        return GenerateStepOk(**self._head(command), checksum=step.checksum)

    def _clear(self, command: ClearKvCache) -> KvCacheCleared:
        self._require(command.model_id)
        self.clear()
        return KvCacheCleared(**self._head(command))

    def _unload(self, command: UnloadModel) -> Unloaded:
        self._require(command.model_id)
        self._model = self._engine = self._model_id = None
        return Unloaded(**self._head(command))

    def _shutdown(self, command: ShutdownRank) -> Bye:
        return Bye(**self._head(command))

    # --- refusals ---------------------------------------------------------------------------------------------------

    def _error(self, kind: RankErrorKind, message: str) -> RankError:
        return RankError(self.rank, kind, message)

    def _require(self, model_id: str) -> None:
        if self._model_id != model_id:
            raise self._error("model_not_loaded", f"no shard of {model_id!r} is loaded here")

    def _joined(self, group_name: str) -> Collective:
        if self._collective is None:
            raise self._error("nccl_not_initialised", f"{group_name} before init: this rank is in no group")
        return self._collective


FAULTS_OF_PROGRESS = 4
"""One fault maps 4 KiB to some MiB of a file, as the system likes. A thread that only waits has one now and then."""


def faults_of_other_threads() -> int:
    """Page faults of the process so far, without those of the calling thread."""
    whole = resource.getrusage(resource.RUSAGE_SELF)
    own_faults = resource.getrusage(resource.RUSAGE_THREAD)
    return whole.ru_majflt + whole.ru_minflt - own_faults.ru_majflt - own_faults.ru_minflt


def progress_of_load() -> int:
    """A number that changes while other threads of this process read weights or fill memory."""
    return faults_of_other_threads() // FAULTS_OF_PROGRESS
