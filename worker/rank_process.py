"""A rank process: its assignment, device and files come from its environment."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

import msgspec
import structlog

from control import logs
from control.engines import OWN
from control.errors import (
    CompilerMissing,
    FurrowError,
    GroupError,
    ModelFilesAway,
    NotMappable,
    RankError,
    RedisUnavailable,
)
from control.keys import ModelKeys
from control.messages import Assignment, describe_structs
from control.process import die_with_parent, name_process
from control.redis.clients import SyncRedis
from control.redis.connection import connect, connect_blocking, run_every
from control.replicas import health
from control.settings import Settings, host_id
from worker.collective import shared_memory
from worker.collective.rendezvous import RedisStore
from worker.leader.group_leader import GroupLeader
from worker.leader.leader import Leader
from worker.rank.address import rendezvous_address
from worker.rank.counters import Labels, counters_of
from worker.rank.exit_codes import LOAD_FAILED, REFUSED, STOPPED
from worker.rank.rank import Rank
from worker.rank.rank_worker import RankWorker
from worker.repository import validation
from worker.repository.assets import assets_of
from worker.selftest.choice import choose_collective
from worker.weights.cache import WeightCache

log = structlog.get_logger()


def run_rank() -> int:
    """Run the rank that FURROW_ASSIGNMENT and FURROW_RANK describe; the result is the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the agent decides the order
    describe_structs()
    settings = Settings.from_environment()
    assignment = msgspec.json.decode(os.environ["FURROW_ASSIGNMENT"], type=Assignment)
    rank = int(os.environ["FURROW_RANK"])
    name_process(f"furrow-rank-{rank}")
    logs.configure(settings.log_format, settings.log_level)
    structlog.contextvars.bind_contextvars(model=assignment.spec.name, replica=assignment.replica, rank=rank)
    clients = connect(settings.redis_url), connect_blocking(settings.redis_url), connect(settings.redis_url)
    try:
        life = begin(settings, assignment, rank, os.environ["FURROW_DEVICE"], clients)

        def stop(_signal: int, _frame: FrameType | None) -> None:
            life.stop()
            if isinstance(life, Leader):  # on a thread: Redis may be away
                threading.Thread(target=life.wake, name="wake", daemon=True).start()

        signal.signal(signal.SIGTERM, stop)
        life.run()
    except Exception as error:
        return exit_status(error, clients[0], assignment, rank)
    return STOPPED


def begin(
    settings: Settings,
    assignment: Assignment,
    rank: int,
    device: str,
    clients: tuple[SyncRedis, SyncRedis, SyncRedis],
) -> Leader | Rank:
    """The leader or the rank, ready to run. SIGUSR1 drains a leader. Raises FurrowError."""
    spec = assignment.spec
    if spec.engine != OWN:
        return begin_engine(assignment, clients)
    check_device(device)
    use_threads(len(assignment.ranks), device)
    if spec.tp > 1:
        choose_collective(device)
    weights = WeightCache(settings.weight_cache_bytes)
    keys = ModelKeys(spec.name).replica(assignment.replica)
    store_of = partial(RedisStore, clients[0], keys)
    rank_worker = RankWorker(rank, spec.tp, device, settings.shared_memory, weights, store_of)
    if spec.tp > 1 and device == "cpu":  # compiled while the ranks gather
        threading.Thread(target=shared_memory.library, name="compile", daemon=True).start()
    counters = counters_of(Labels(spec.name, assignment.replica, rank))
    if rank:
        return Rank(*clients, spec.name, assignment.replica, rank_worker, counters)
    files = validation.inspect(Path(os.environ["FURROW_FOLDER"]), spec.images)
    assets = assets_of(files, spec)
    address = rendezvous_address(clients[0])
    owner = f"{host_id()}/{os.getpid()}"
    leader = GroupLeader(clients, assignment, owner, files, assets, rank_worker, address, counters=counters)
    drain_on_signal(leader)
    return leader


def begin_engine(assignment: Assignment, clients: tuple[SyncRedis, SyncRedis, SyncRedis]) -> Leader:
    """The leader of an external engine, ready to run. Raises FurrowError."""
    from worker.external.engine import Address  # only here: ranks do without an HTTP client
    from worker.external.host import ADDRESS_VARIABLE
    from worker.leader.engine_leader import EngineLeader
    from worker.repository.external import external_model

    spec = assignment.spec
    model = external_model(Path(os.environ["FURROW_FOLDER"]), spec)
    address = Address.parse(os.environ[ADDRESS_VARIABLE])
    counters = counters_of(Labels(spec.name, assignment.replica, 0, served_by=spec.engine))
    owner = f"{host_id()}/{os.getpid()}"
    leader = EngineLeader(clients, assignment, owner, model.fingerprint, model.assets, address, counters)
    drain_on_signal(leader)
    return leader


def drain_on_signal(leader: Leader) -> None:
    """Let SIGUSR1 drain a leader."""

    def drain(_signal: int, _frame: FrameType | None) -> None:
        leader.signals.draining = True

    signal.signal(signal.SIGUSR1, drain)


def check_device(device: str) -> None:
    """Raise DevicesError for a GPU that is asked for and absent; the CPU is never taken in its place."""
    if device.startswith("cuda"):
        from worker.models.torch.device import use_gpu  # only here: a CPU does without torch

        use_gpu(device)


def use_threads(ranks_here: int, device: str) -> None:
    """Share the host's cores between its CPU ranks; OMP_NUM_THREADS overrides."""
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        count = max(1, len(os.sched_getaffinity(0)) // ranks_here)
        os.environ["OMP_NUM_THREADS"] = str(count)
        if (torch := sys.modules.get("torch")) is not None:  # it has read the environment
            torch.set_num_threads(count)


MAY_PASS = (GroupError, RedisUnavailable, ModelFilesAway)
"""Errors after which another start of the same assignment may succeed. A rank that serves waits for Redis, so
RedisUnavailable ends only a rank that starts."""
ENDS_ALIKE = tuple(f"{kind.__name__}:" for kind in (CompilerMissing, NotMappable))
"""The beginnings of a rank's answer to a load that would fail so at each start on this host."""


def exit_status(error: Exception, client: SyncRedis, assignment: Assignment, rank: int) -> int:
    """Store the reason of the end, and return the exit status. Raises `error` again if Furrow does not define it."""
    if not isinstance(error, FurrowError):
        store_reason(client, assignment, rank, f"{type(error).__name__}: {error}")
        raise error
    why = str(error)
    if isinstance(error, RedisUnavailable):
        why = f"Redis went away before the rank was up: {error}"
    store_reason(client, assignment, rank, why)
    if isinstance(error, MAY_PASS) and not _ends_alike(error):
        log.error("could not start", kind=type(error).__name__, error=why, action="rank_exit")
        return LOAD_FAILED
    log.error("refused the assignment", kind=type(error).__name__, error=why, action="rank_exit")
    with suppress(RedisUnavailable):  # the agent poisons the epoch too, when it reaps this process
        epoch = health.read_epoch(client, assignment.spec.name, assignment.replica)
        health.write_poison(client, assignment.spec.name, assignment.replica, epoch, rank, "refused", why)
    return REFUSED


def _ends_alike(error: FurrowError) -> bool:
    """True for a load of which any rank says what each start would meet again. A rank's answer has the error's kind and
    text only."""
    sides = [error.leader, *error.ranks] if isinstance(error, GroupError) else [error]
    return any(isinstance(side, RankError) and side.message.startswith(ENDS_ALIKE) for side in sides)


def store_reason(client: SyncRedis, assignment: Assignment, rank: int, why: str) -> None:
    """Store why this process ends, for its agent, which sees only the exit status."""
    reason = health.EndReason(host=host_id(), pid=os.getpid(), message=why)
    try:
        run_every(client, health.note_end(assignment.spec.name, assignment.replica, rank, reason))
    except RedisUnavailable as error:
        log.warning("reason of the end not stored", error=str(error), action="rank_exit")
