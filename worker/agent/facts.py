"""The facts of a host, gathered by a thread: files of models, connections to other hosts, disks, compiler."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog

from control import cache as cache_files
from control import host_memory
from control.errors import FurrowError, RedisUnavailable
from control.messages import Assignment, ModelSpec
from control.placement import farm
from control.placement.membership import LIFE_MS, FilesHere, HostFacts, Machine, Space, facts_of_all, put_facts
from control.process import remembered_program
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.redis.servers import RoundTrip, measure_round_trip
from control.version import VERSION
from worker.agent.devices import device_memory
from worker.native import compiled, host
from worker.native.compiled import builds
from worker.rank.address import rendezvous_address
from worker.repository.files import inspect
from worker.repository.fingerprint import fingerprints
from worker.repository.source import cache_folder, on_this_host
from worker.selftest import switches
from worker.selftest.records import KIND, Record

log = structlog.get_logger()


# Connections between the hosts of a replica, tried as ranks make them: to a free port of the host's address.


CONNECT_WITHIN_S = 2.0
RETRY_S = 0.5


class Endpoint(NamedTuple):
    address: str
    port: int


class PortProbe:
    """A listener that accepts connections of other agents and closes them at once."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self.endpoint: Endpoint | None = None

    def open(self, address: str) -> None:
        """Listen on a free port of `address`, unless that is done. Raises OSError for one that this host has not."""
        if self.endpoint is not None and self.endpoint.address == address:
            return
        self.close()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        self._listener, self.endpoint = listener, Endpoint(address, listener.getsockname()[1])
        threading.Thread(target=_accept, args=(listener,), name="ports", daemon=True).start()

    def close(self) -> None:
        listener, self._listener, self.endpoint = self._listener, None, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listener.close()


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0 or not _listens(listener):
                return
            time.sleep(RETRY_S)  # a connection that ended at once, or too many open files
            continue
        connection.close()


def _listens(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def connect_to(peers: Mapping[str, Endpoint]) -> dict[str, str]:
    """Hosts → the error of a connection there, empty for none."""
    return {host: _error(endpoint) for host, endpoint in peers.items()}


def _error(endpoint: Endpoint) -> str:
    try:
        socket.create_connection(endpoint, timeout=CONNECT_WITHIN_S).close()
    except OSError as error:
        return f"{endpoint.address}:{endpoint.port}: {error.strerror or error}"
    return ""


# The fingerprints of the farm's models as this host has their files, computed once for each state of the files.


Signature = tuple[tuple[str, int, int], ...]
"""Path, size and time of change of each file."""
_Key = tuple[str, str | None, bool]


class ModelFingerprints:
    """Reads a model's files again only where they changed."""

    def __init__(self) -> None:
        self._files_by_key: dict[_Key, tuple[Path, Signature, FilesHere]] = {}

    def of(self, specs: Iterable[ModelSpec]) -> dict[str, FilesHere]:
        """By model; one whose files are still to be downloaded is left out."""
        keys = {spec.name: (spec.source, spec.gguf, spec.images) for spec in specs if not spec.unload}
        self._files_by_key = {key: entry for key, entry in self._files_by_key.items() if key in keys.values()}
        return {name: files for name, key in keys.items() if (files := self._one(key)) is not None}

    def _one(self, key: _Key) -> FilesHere | None:
        source, gguf, images = key
        try:
            if (entry := self._files_by_key.get(key)) is not None and entry[1] == _signature(entry[0]):
                return entry[2]
            place = on_this_host(source, gguf)
            if place is None:
                return None
            signature = _signature(place)  # before the files are read: a later change is seen in the next turn
            files = FilesHere(fingerprint=fingerprints(inspect(place, images), "auto").stored)
            self._files_by_key[key] = place, signature, files
            return files
        except (FurrowError, OSError, ValueError) as error:
            return FilesHere(error=str(error))
        except Exception as error:  # files of one model end no facts of the others
            log.exception("the files of a model can't be read", source=source, action="read_files")
            return FilesHere(error=f"{type(error).__name__}: {error}")


def _signature(place: Path) -> Signature:
    """Of a GGUF file, or of the files of a folder."""
    paths = sorted(place.iterdir()) if place.is_dir() else [place]
    states = [(str(path), path.stat()) for path in paths]
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in states)


# The collection of a host's facts: disks, shared memory, compiler, kernels; no device is opened.


SHARED_MEMORY = Path("/dev/shm")
COMPILER_WITHIN_S = 10.0


def collect(trip: RoundTrip, files: dict[str, FilesHere], ranks: Mapping[str, str]) -> HostFacts:
    """The facts of this host; `files` are those of the models here, `ranks` the version of each rank."""
    return HostFacts(
        at_ms=trip.at_ms,
        version=VERSION,
        clock_ms=trip.skew_ms,
        round_trip_ms=round(trip.ms, 3),
        models=space(cache_folder(None, os.environ)[0]),
        cache=space(cache_files.folder("weights").parent),
        shared_memory=space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        compiler=compiler(),
        brought=next((path.stem for path in builds(host.SOURCE, for_this_processor=True)), ""),
        native=host.unavailable() or "",
        kernels_off=kernels_off(),
        files=files,
        machine=machine(),
        devices=device_memory(),
        program=" ".join(remembered_program()),
        old_ranks={name: version for name, version in ranks.items() if version != VERSION},
    )


def machine() -> Machine:
    """The processors and the memory of this host, as far as this process may use them."""
    return Machine(
        processors=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        memory=host_memory.capacity(),
        free=host_memory.available(),
    )


def space(folder: Path, statvfs: Callable[[Path], Any] = os.statvfs) -> Space | None:
    """Of the file system that holds the folder, or that will hold it once it is made; None where it does not answer."""
    try:
        existing = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
        system = statvfs(existing)
    except OSError:
        return None
    total = system.f_blocks * system.f_frsize
    free = system.f_bavail * system.f_frsize
    return Space(path=str(folder), total=total, free=free, unwritable=unwritable(existing))


def unwritable(folder: Path) -> str:
    """The reason why no file can be made in what is there of a folder's path; empty where one can."""
    if not folder.is_dir():
        return f"{folder} is no folder"
    if os.access(folder, os.W_OK | os.X_OK):
        return ""
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return f"the file system of {folder} is read-only" if read_only else f"the worker's user may not write in {folder}"


def compiler() -> str:
    """The command and the first line of its version; empty where there is no compiler, or none that runs."""
    command = compiled.compiler_command()
    return _compiler(command) if command else ""


@functools.lru_cache(4)
def _compiler(command: str) -> str:
    try:
        version = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=COMPILER_WITHIN_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{command}: {version.stdout.partition(chr(10))[0].strip()}"


def kernels_off() -> list[str]:
    """Kernels that FURROW_DISABLE names, and those that failed the latest trial of each device."""
    forced = [name.strip() for name in os.environ.get(switches.VARIABLE, "").split(",") if name.strip()]
    lines = [f"{name}: named in {switches.VARIABLE}" for name in forced]
    tried: set[str] = set()
    for entry in cache_files.entries(KIND):
        try:
            record = msgspec.json.decode(entry.path.read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if record.subject.device not in tried:
            tried.add(record.subject.device)
            lines += [f"{name} on {record.subject.device}: {reason}" for name, reason in sorted(record.off().items())]
    return lines


# The thread that gathers the facts of this host and publishes them.


EVERY_S = LIFE_MS / 6000


class FactsPublisher:
    """Publishes at once, and every EVERY_S, until the process ends."""

    def __init__(self, client: SyncRedis, host_id: str, ranks: Callable[[], Mapping[str, str]]) -> None:
        """`client`: one of its own; `ranks`: the version of each rank of this host."""
        self._client = client
        self._host_id = host_id
        self._ranks = ranks
        self._files, self._probe = ModelFingerprints(), PortProbe()

    def start(self) -> None:
        threading.Thread(target=self._run, name="facts", daemon=True).start()

    def publish(self) -> None:
        """Gather and publish once. Raises RedisUnavailable."""
        trip = measure_round_trip(self._client)
        facts = collect(trip, self._files.of(catalog.list_specs(self._client)), self._ranks())
        run(self._client, put_facts(self._host_id, self._with_ports(facts)))

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            try:
                self.publish()
            except RedisUnavailable:  # the agent's loop logs it
                pass
            except Exception:  # a file system or a compiler with a fault of its own: the next turn may know more
                log.exception("facts can't be gathered", action="host_facts")
            pause.wait(EVERY_S)

    def _with_ports(self, facts: HostFacts) -> HostFacts:
        """The facts with the address of this host and the hosts that it reaches, while a replica spans several."""
        if not any(_is_part(assignment) for assignment in farm.assignments(self._client, self._host_id)):
            self._probe.close()
            return facts
        address = rendezvous_address(self._client)
        try:
            self._probe.open(address)
        except OSError as error:
            return msgspec.structs.replace(
                facts, address=address, ports={self._host_id: f"{address}: {error.strerror or error}"}
            )
        peers = peers_of(self._host_id, farm.all_assignments(self._client))
        endpoints = {
            host: Endpoint(peer_facts.address, peer_facts.port)
            for host, peer_facts in facts_of_all(self._client, peers).items()
            if peer_facts is not None and peer_facts.port
        }
        endpoint = self._probe.endpoint
        port = 0 if endpoint is None else endpoint.port
        return msgspec.structs.replace(facts, address=address, port=port, ports=connect_to(endpoints))


def peers_of(host_id: str, assignments_by_host: dict[str, list[Assignment]]) -> list[str]:
    """The other hosts that run a part of a replica of which this host runs one."""
    own_replicas = {
        (assignment.spec.name, assignment.replica)
        for assignment in assignments_by_host.get(host_id, ())
        if _is_part(assignment)
    }
    return [
        host
        for host, assignments in assignments_by_host.items()
        if host != host_id
        and any((assignment.spec.name, assignment.replica) in own_replicas for assignment in assignments)
    ]


def _is_part(assignment: Assignment) -> bool:
    return len(assignment.ranks) < assignment.spec.tp
