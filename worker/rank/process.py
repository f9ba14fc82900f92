"""A rank process from its environment to its end: what the agent assigned, on which device, with which files."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec
import structlog
import torch

from control import logs
from control.errors import DevicesError, FurrowError, GroupError, ModelFilesAway, RedisUnavailable
from control.messages import Assignment
from control.process import die_with_parent, name_process
from control.redis.clients import SyncRedis
from control.redis.connection import connect, connect_blocking, run_every
from control.replicas import health
from control.settings import Settings, host_id
from worker.collective import native
from worker.health.exits import LOAD_FAILED, REFUSED, STOPPED
from worker.leader.leader import Leader
from worker.rank.rank import Rank
from worker.repository import gates
from worker.repository.assets import read_assets
from worker.tp_group.address import rendezvous_address
from worker.tp_group.executor import Executor

log = structlog.get_logger()


def run_rank() -> int:
    """Run the rank that FURROW_ASSIGNMENT and FURROW_RANK describe; the result is the exit status."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the agent decides the order
    settings = Settings.from_environment()
    assignment = msgspec.json.decode(os.environ["FURROW_ASSIGNMENT"], type=Assignment)
    rank, device = int(os.environ["FURROW_RANK"]), os.environ["FURROW_DEVICE"]
    spec = assignment.spec
    name_process(f"furrow-rank-{rank}")
    logs.configure(settings.log_format, settings.log_level)
    structlog.contextvars.bind_contextvars(model=spec.name, replica=assignment.replica, rank=rank)
    life: Leader | Rank
    clients = connect(settings.redis_url), connect_blocking(settings.redis_url), connect(settings.redis_url)
    try:
        check_device(device)
        use_threads(len(assignment.ranks), device)
        executor = Executor(rank, spec.tp, device, settings.shared_memory)
        if spec.tp > 1 and device == "cpu":  # meanwhile the ranks gather
            threading.Thread(target=native.library, name="compile", daemon=True).start()
        if rank == 0:
            files = gates.inspect(Path(os.environ["FURROW_FOLDER"]))
            life = leader = Leader(
                clients,
                assignment,
                f"{host_id()}/{os.getpid()}",
                files,
                read_assets(files, spec.max_context),
                executor,
                rendezvous_address(clients[0]),
            )

            def drain(_signal: int, _frame: FrameType | None) -> None:
                leader.draining = True

            signal.signal(signal.SIGUSR1, drain)
        else:
            life = Rank(*clients, spec.name, assignment.replica, executor)

        def stop(_signal: int, _frame: FrameType | None) -> None:
            life.stopping = True

        signal.signal(signal.SIGTERM, stop)
        life.run()
        return STOPPED
    except GroupError as error:
        log.error("group not formed", error=str(error), action="rank_exit")
        tell_why(clients[0], assignment, rank, str(error))
        return LOAD_FAILED
    except RedisUnavailable as error:  # only on its way up: a rank that serves waits
        log.error("Redis unavailable at the start", error=str(error), action="rank_exit")
        tell_why(clients[0], assignment, rank, f"Redis went away before the rank was up: {error}")
        return LOAD_FAILED
    except ModelFilesAway as error:  # they may be back in a moment
        log.error("model files unavailable", error=str(error), action="rank_exit")
        tell_why(clients[0], assignment, rank, str(error))
        return LOAD_FAILED
    except FurrowError as error:
        log.error("refused the assignment", error=str(error), action="rank_exit")
        tell_why(clients[0], assignment, rank, str(error))
        with suppress(RedisUnavailable):  # the agent poisons the epoch too, when it reaps this process
            epoch = health.read_epoch(clients[0], spec.name, assignment.replica)
            health.write_poison(clients[0], spec.name, assignment.replica, epoch, rank, "refused", str(error))
        return REFUSED
    except Exception as error:
        tell_why(clients[0], assignment, rank, f"{type(error).__name__}: {error}")
        raise


def tell_why(client: SyncRedis, assignment: Assignment, rank: int, why: str) -> None:
    """Leave the reason of this process's end for its agent, which sees only the exit status."""
    reason = health.EndReason(host=host_id(), pid=os.getpid(), message=why)
    try:
        run_every(client, health.note_end(assignment.spec.name, assignment.replica, rank, reason))
    except RedisUnavailable as error:
        log.warning("reason of the end not stored", error=str(error), action="rank_exit")


def check_device(device: str) -> None:
    """Raise DevicesError for a GPU that is asked for and absent; the CPU is never taken in its place."""
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        count = torch.cuda.device_count()
        if index >= count:
            raise DevicesError(
                f"device {device} was asked for, but torch sees {count} GPUs on this host; "
                "name other --devices, or allow the CPU with --devices cpu"
            )
        torch.cuda.set_device(index)


def use_threads(ranks_here: int, device: str) -> None:
    """Share the host's cores between its CPU ranks; OMP_NUM_THREADS overrides."""
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
