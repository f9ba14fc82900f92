"""The rank processes of one replica on this host: spawned by its supervisor, and spawned again after a pause."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import msgspec
import structlog

from control.backoff import doubling
from control.engines import OWN
from control.errors import ModelFilesError, SettingsError
from control.messages import Assignment, encode
from control.process import python_command
from control.replicas.health import Beat
from control.replicas.memory_deaths import Occupant
from control.version import VERSION
from worker.agent.standby import Standby, StandbyModel, rank_environment
from worker.agent.supervision.client import ChildProcess, SupervisorClient
from worker.agent.supervision.wire import AT_ONCE, Ending, Tag
from worker.external.engine import ENGINE_RANK, Address, Launch
from worker.external.host import (
    ADDRESS_VARIABLE,
    address_of,
    engine_command,
    engine_environment,
    engine_settings,
    last_lines,
    log_file,
    settings_of,
)
from worker.native.host import to_be_compiled
from worker.repository.external import check_adapter_files
from worker.repository.pooling import MODULES

log = structlog.get_logger()

PAUSES_S = (0.0, *doubling(0.5, 8.0))
"""Pauses before the n-th spawn without a ready group in between; after the last one the replica is `failed`."""
STOP_LIMIT_S = 75.0
"""Time for a leader to finish its step and give back its requests before it is killed."""
LEADERLESS_S = 10.0
"""A draining group without a leader for this time, on any host, does not come back."""


@dataclass(frozen=True)
class Exit:
    """A rank process that ended. `past` says that it ended before this agent was there."""

    place: tuple[str, str]
    rank: int
    pid: int
    status: int
    past: bool = False


@dataclass(frozen=True)
class DeathNotice:
    """The death of a rank process, for the farm. `epoch` is the one to poison."""

    exit: Exit
    what: str
    epoch: int
    given_up: bool
    killed_for: str | None
    """The reason for which this agent, or the kernel, killed the process."""


@dataclass(frozen=True)
class Failure:
    """One rank's end. `explained`: by the process itself, or by what its agent killed it for; otherwise only by its
    exit status, which says little where it was ended from outside (`outside`)."""

    message: str
    explained: bool
    outside: bool

    @property
    def weight(self) -> int:
        return 2 if self.explained else int(not self.outside)


@dataclass
class ReplicaState:
    """The state of one replica that an agent records for the next agent of the host. Times are of the
    monotonic clock, which all processes of a host share."""

    assignment: Assignment
    folder: str
    _: KW_ONLY
    attempts: int = 0
    due: float = 0.0
    served: bool = False
    """True if its group was ever ready."""
    drain_by: float | None = None
    led_at: float | None = None
    """The time at which a draining group was last seen with a leader."""
    stop_by: float | None = None
    failed: str | None = None
    """The reason for which the replica was given up; None while it lives."""
    failed_elsewhere: bool = False
    """True if another host, which runs ranks of the replica too, gave it up."""
    failures: dict[int, Failure] = field(default_factory=dict)
    """Of each rank that ended since the group last served, the end that explains most; in order of their first ends."""
    killed: dict[int, str] = field(default_factory=dict)
    """The reasons for which this agent killed processes that are not reaped yet, by pid."""
    loaded_ms: int = 0
    """The time at which this host first got this revision, by the server's clock; 0 until that is known."""
    memory: dict[int, int] = field(default_factory=dict)
    """By rank, the most bytes that a process of it was seen to use."""


@dataclass
class ReplicaProcesses(ReplicaState):
    """One replica's processes, children of the host's supervisor."""

    host_id: str
    redis_url: str
    supervisor: SupervisorClient
    exits: queue.SimpleQueue[Exit] | queue.SimpleQueue[Exit | None]
    standby: Standby | None = None
    """The host's standby, from which ranks are forked; shared with other replicas."""
    processes: dict[int, ChildProcess] = field(default_factory=dict)
    outdated: set[int] = field(default_factory=set)
    """Pids of ranks that were ended because they run another version; these ends are no failures."""
    compiles: bool = False
    """True once a process was started that compiles the ranks' library."""

    @property
    def place(self) -> tuple[str, str]:
        return self.assignment.spec.name, self.assignment.replica

    @property
    def preparation(self) -> StandbyModel | None:
        """The model that a standby prepares for a rank of this replica; None for an external engine's."""
        assignment = self.assignment
        if assignment.spec.engine != OWN:
            return None
        return StandbyModel(self.folder, assignment.spec.dtype, assignment.devices[0], 0 in assignment.ranks)

    @property
    def draining(self) -> bool:
        """True while it drains: it finishes its requests, and a rank that dies meanwhile is started again for that."""
        return self.drain_by is not None

    @property
    def stopping(self) -> bool:
        return self.stop_by is not None

    def owner(self, pid: int) -> str:
        """The owner half of the lock token that the leader with `pid` holds."""
        return f"{self.host_id}/{pid}"

    def spawn_missing(self) -> None:
        """Start every rank that has no process, once the pause is over."""
        if self.stopping or self.failed is not None or time.monotonic() < self.due:
            return
        missing = [(rank, device) for rank, device in self._parts if rank not in self.processes]
        if missing and self._end_outdated():
            return  # until they are gone
        preparation = self.preparation
        if missing and preparation and self.standby is not None and self.standby.awaited(preparation):
            self._compile_early(*missing[0])
            return
        try:
            for rank, device in missing:
                is_engine = rank == ENGINE_RANK and self.assignment.spec.engine != OWN
                self.processes[rank] = self._spawn_engine() if is_engine else self._spawn(rank, device)
        except (SettingsError, ModelFilesError) as error:  # the host has not the engine, or an adapter, any more
            self.give_up(str(error))

    @property
    def _parts(self) -> list[tuple[int, str]]:
        """The processes of this host's part: ranks with their devices, or the leader of an external engine and the
        engine itself, which has all devices."""
        assignment = self.assignment
        if assignment.spec.engine == OWN:
            return list(zip(assignment.ranks, assignment.devices, strict=True))
        settings = engine_settings().get(assignment.spec.engine)
        runs_already = settings is not None and bool(settings.url)
        return [(0, "cpu")] if runs_already else [(0, "cpu"), (ENGINE_RANK, "")]

    def _end_outdated(self) -> bool:
        """End ranks that run another version of Furrow than a rank that starts now would: a group has one version."""
        outdated = [
            rank
            for rank, process in self.processes.items()
            if process.tag.get("version") != VERSION and process.tag.get("kind") != "engine"
        ]
        for rank in outdated:
            self.outdated.add(self.processes[rank].pid)
            self.kill(rank)
        return bool(outdated)

    def _compile_early(self, rank: int, device: str) -> None:
        """Compile a CPU rank's library while it waits for the standby, on a host that has none of this version yet."""
        if device != "cpu" or self.compiles or not to_be_compiled():
            return
        self.compiles = True
        environment = rank_environment(self.redis_url) | self._duty(rank, device)
        process = self.supervisor.spawn(python_command("worker", "compile"), environment, {"kind": "compile"}, AT_ONCE)
        process.when_ended(lambda _: process.forget())

    def _duty(self, rank: int, device: str) -> dict[str, str]:
        """The environment of a rank process, from which it reads its rank and settings."""
        assignment = self.assignment
        if assignment.kv_limit is not None:  # what it was given of the host's memory
            spec = msgspec.structs.replace(assignment.spec, kv_tokens=assignment.kv_limit)
            assignment = msgspec.structs.replace(assignment, spec=spec)
        return {
            "FURROW_ASSIGNMENT": encode(assignment).decode(),
            "FURROW_RANK": str(rank),
            "FURROW_DEVICE": device,
            "FURROW_FOLDER": self.folder,
            "FURROW_HOST_ID": self.host_id,
            "FURROW_REDIS_URL": self.redis_url,
            **self._engine_duty,
        }

    @property
    def _engine_duty(self) -> dict[str, str]:
        return {} if self.assignment.spec.engine == OWN else {ADDRESS_VARIABLE: str(self._engine_address)}

    @property
    def _engine_address(self) -> Address:
        """The address at which this replica's external engine listens. Raises OSError, or SettingsError on a host
        without it."""
        name = self.assignment.spec.engine
        return address_of(name, settings_of(name), self.host_id, *self.place)

    def _spawn_engine(self) -> ChildProcess:
        """Start the external engine, with its log in a file of its own."""
        spec = self.assignment.spec
        settings = settings_of(spec.engine)
        address = self._engine_address
        check_adapter_files(spec)
        launch = Launch(
            model=Path(self.folder),
            name=spec.name,
            address=address,
            devices=tuple(self.assignment.devices),
            arguments=spec.engine_args,
            context=spec.max_context,
            memory=settings.memory,
            adapters=spec.adapters,
            embeds=(Path(self.folder) / MODULES).is_file(),
            by_module=settings.by_module,
        )
        if address.socket:
            Path(address.socket).unlink(missing_ok=True)  # of a process that has ended; a bind would fail
        model, replica = self.place
        words = [
            str(log_file(model, replica)),
            str(settings.memory or 0),
            *engine_command(spec.engine, settings, launch),
        ]
        tag: Tag = {"kind": "engine", "model": model, "replica": replica, "rank": ENGINE_RANK, "version": VERSION}
        environment = engine_environment(spec.engine, launch)
        process = self.supervisor.spawn(
            python_command("worker", "engine", *words), environment, tag, self._ending(ENGINE_RANK)
        )
        log.info("spawned", model=model, replica=replica, engine=spec.engine, pid=process.pid, action="engine_spawn")
        self._watch(ENGINE_RANK, process)
        return process

    def _spawn(self, rank: int, device: str) -> ChildProcess:
        duty = self._duty(rank, device)
        model, replica = self.place
        tag: Tag = {"kind": "rank", "model": model, "replica": replica, "rank": rank, "version": VERSION}
        ending = self._ending(rank)
        process = self.standby.fork(duty, tag, ending) if self.standby is not None else None
        way = "fork" if process is not None else "new process"
        if process is None:
            environment = rank_environment(self.redis_url) | duty
            process = self.supervisor.spawn(python_command("worker", "rank"), environment, tag, ending)
        log.info(
            "spawned",
            model=model,
            replica=replica,
            rank=rank,
            pid=process.pid,
            device=device,
            how=way,
            action="rank_spawn",
        )
        self._watch(rank, process)
        return process

    def _ending(self, rank: int) -> Ending:
        """The end of the rank without an agent: the leader first; at once where the leader is on another host."""
        if 0 not in self.assignment.ranks:
            return AT_ONCE
        return Ending(order=min(rank, 1))

    def _watch(self, rank: int, process: ChildProcess, past: bool = False) -> None:
        place = self.place
        pid = process.pid
        process.when_ended(lambda status: self.exits.put(Exit(place, rank, pid, status, past)))

    def adopt(self, rank: int, process: ChildProcess) -> None:
        """Take over a rank process that an earlier agent started; its exit may be reported at once."""
        self.processes[rank] = process
        self._watch(rank, process, past=process.poll() is not None)

    def ended(self, exit: Exit) -> bool:
        """Note an exit; False if that process was not this replica's any more."""
        process = self.processes.get(exit.rank)
        if process is None or process.pid != exit.pid:
            return False
        del self.processes[exit.rank]
        return True

    def pause(self) -> bool:
        """Plan the next spawn; False if the tries are used up."""
        if self.attempts >= len(PAUSES_S):
            return False
        self.due = time.monotonic() + PAUSES_S[self.attempts]
        self.attempts += 1
        return True

    def ready(self) -> None:
        """The group served: earlier failures are forgiven."""
        self.attempts = 0
        self.served = True
        self.failures.clear()

    def note(self, rank: int, failure: Failure) -> None:
        """Remember a rank's end, unless an earlier one explains more."""
        if rank not in self.failures or failure.weight >= self.failures[rank].weight:
            self.failures[rank] = failure

    @property
    def cause(self) -> str:
        """The cause for which the group does not serve: the first of the failures that explain most. One rank's error
        is followed by the ends of others, which tell nothing."""
        return max(self.failures.values(), key=lambda failure: failure.weight).message if self.failures else ""

    def give_up(self, why: str, *, elsewhere: bool = False) -> None:
        """Start no rank any more, and end those that are left."""
        self.failed = why
        self.failed_elsewhere = elsewhere
        for rank in list(self.processes):
            self.kill(rank)

    def try_anew(self) -> None:
        """Start missing ranks at once, with all tries: what ended them was another replica's."""
        self.attempts = 0
        self.due = 0.0

    def start_over(self) -> None:
        """Start ranks again after it was given up."""
        self.failed = None
        self.failed_elsewhere = False
        self.attempts = 0
        self.due = 0.0
        self.failures.clear()

    def kill(self, rank: int, why: str = "") -> None:
        """End a rank that hangs; SIGKILL ends a stopped process too. `why` explains its end."""
        if rank in self.processes:
            if why:
                self.killed.setdefault(self.processes[rank].pid, why)
            self.processes[rank].send_signal(signal.SIGKILL)

    def drain(self, led: bool) -> None:
        """Let it finish its requests. To be called in every tick, as a leader that is only starting gets no signal. A
        replica that has never served has nothing to finish; past the limit the rest is given back.

        One that has never served has nothing to finish, and past the limit the rest is given back. Ranks whose leader
        is on another host hear of the end from it; `led` says whether there is one.
        """
        now = time.monotonic()
        if self.drain_by is None:
            self.drain_by = now + self.assignment.spec.drain_s
        self.led_at = now if led else self.led_at or now
        is_here = 0 in self.assignment.ranks
        late = now > self.drain_by if is_here else now - self.led_at > LEADERLESS_S
        if late or not self.served or self.failed is not None:
            self.stop()
        elif 0 in self.processes:
            self.processes[0].send_signal(signal.SIGUSR1)

    def stop(self, host_leaves: bool = False) -> None:
        """Ask for an orderly end: the leader first, which then tells its ranks to shut down.

        Where the host leaves the farm and the leader is on another, the group will go on without these ranks: they are
        ended at once, so that it learns of it, instead of being driven on for as long as there is work.
        """
        if not self.stopping:
            self.stop_by = time.monotonic() + STOP_LIMIT_S
            for rank in self._first():
                if host_leaves and 0 not in self.assignment.ranks:
                    self.kill(rank)
                else:
                    self.processes[rank].terminate()

    def _first(self) -> list[int]:
        return [0] if 0 in self.processes else list(self.processes)

    def press(self) -> None:
        """Once the leader is gone end the others; past the limit kill all."""
        if self.stop_by is None:
            return
        if 0 not in self.processes:
            for process in self.processes.values():
                process.terminate()
        if time.monotonic() > self.stop_by:
            for rank in list(self.processes):
                self.kill(rank)

    def saw(self, beats: Sequence[Beat | None]) -> None:
        """Note the memory of the ranks here. `beats` are by rank."""
        for rank, process in self.processes.items():
            beat = beats[rank] if rank < len(beats) else None
            if beat is not None and beat.pid == process.pid:
                self.memory[rank] = max(self.memory.get(rank, 0), beat.memory_bytes)

    @property
    def occupant(self) -> Occupant:
        """The memory of this host that it takes."""
        model, replica = self.place
        return Occupant(
            model=model,
            replica=replica,
            loaded_ms=self.loaded_ms,
            ranks=len(self.assignment.ranks),
            used_bytes=sum(self.memory.values()),
        )

    def pids(self) -> dict[int, int]:
        """Of the processes that beat, by rank; an external engine does not."""
        size = self.assignment.spec.group_size
        return {rank: process.pid for rank, process in self.processes.items() if rank < size}

    @property
    def engine(self) -> ChildProcess | None:
        """The process of its external engine, while there is one."""
        return None if self.assignment.spec.engine == OWN else self.processes.get(ENGINE_RANK)

    def describe(self, rank: int) -> str:
        """The name of one of its processes, in a message."""
        spec = self.assignment.spec
        return f"the engine {spec.engine}" if rank >= spec.group_size else f"rank {rank}"

    def last_words(self, rank: int) -> str:
        """The end of an external engine's log; empty for a rank, which has its reason in Redis."""
        spec = self.assignment.spec
        return "" if rank < spec.group_size else last_lines(log_file(*self.place))
