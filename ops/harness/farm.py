"""A private farm for a scenario: a server of its own, one agent, one API, and as many replicas as the scenario asks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from control.errors import ModelUnavailable
from control.keys import ModelKeys
from control.listening import free_port
from control.messages import LogEntry, ModelSpec
from control.placement import membership
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect, optional_text, read, run_every
from control.replicas import model_overviews
from control.requests import read_pages
from control.settings import keeps_standby
from ops.common.waiting import NotInTime, until
from ops.demo import MODEL_DIR
from ops.harness.client import Base
from ops.local.embedded import EmbeddedServer
from ops.local.ready import is_ready
from ops.local.server_binary import ServerBinary
from ops.local.supervisor import Part, Supervisor

START_LIMIT_S = 300.0
STOP_LIMIT_S = 60.0
TICK_S = 0.2
HOST = "127.0.0.1"
DEMO = "demo"
NOBODY_REFUSED = ("--max-queue-wait", "0")
"""Options of an API that lets everybody wait; `python -m ops.bench.load.overload` measures refusing."""


def say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


def demo_spec(tp: int = 1, dtype: str = "auto", kv_tokens: int | None = None) -> ModelSpec:
    """The demonstration model on CPU ranks."""
    return ModelSpec(name=DEMO, source=str(MODEL_DIR), tp=tp, devices=["cpu"] * tp, dtype=dtype, kv_tokens=kv_tokens)


def part_environment(redis_url: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a farm's parts. They log errors only, unless FURROW_LOG_LEVEL says otherwise."""
    level = os.environ.get("FURROW_LOG_LEVEL") or "error"
    return {**(environment or {}), "FURROW_REDIS_URL": redis_url, "FURROW_LOG_LEVEL": level}


@contextmanager
def private_redis(binary: ServerBinary | None = None) -> Generator[tuple[Path, str]]:
    """A folder that is deleted at the end, and the URL of a private server that has its data below it."""
    with (
        tempfile.TemporaryDirectory(prefix="furrow-bench-") as folder,
        EmbeddedServer(Path(folder) / "redis", binary) as url,
    ):
        yield Path(folder), url


@dataclass(frozen=True)
class PrivateFarm:
    """A running private farm, and a connection to its Redis."""

    url: str
    redis_url: str
    names: list[str]
    """Of its models."""
    client: SyncRedis

    @property
    def base(self) -> Base:
        """Of its API."""
        return Base.of(self.url)


@contextmanager
def private_farm(
    spec: ModelSpec,
    *api_options: str,
    replicas: tuple[int, ...] = (1,),
    environment: Mapping[str, str] | None = None,
) -> Generator[PrivateFarm]:
    """Serve `spec` once per number in `replicas`, under names of their own.

    `api_options` are those of `furrow api`; `environment` is added to that of agent and API. Where a standby is kept it
    waits for work too, as its imports are over then. Raises ModelUnavailable where a replica can't be served.
    """
    names = [spec.name] if len(replicas) == 1 else [f"{spec.name}-{index + 1}" for index in range(len(replicas))]
    with ExitStack() as stack:
        _, redis_url = stack.enter_context(private_redis())
        client = stack.enter_context(connect(redis_url))
        for name, count in zip(names, replicas, strict=True):
            catalog.put_spec(client, msgspec.structs.replace(spec, name=name, replicas=count))
        port = free_port(HOST, 0)
        supervisor = Supervisor(part_environment(redis_url, environment), say)
        stack.callback(supervisor.stop)
        supervisor.start(Part("worker", "worker.agent.supervision", []))
        supervisor.start(Part("api", "api", ["--host", HOST, "--port", str(port), *api_options]))
        own_environment = {**os.environ, **(environment or {})}

        def served() -> bool:
            supervisor.tend()
            ready = is_ready((HOST, port)) and has_standby(client, own_environment)
            return _loaded(client, names) and ready

        try:
            until(served, "the farm serves", START_LIMIT_S, TICK_S)
        except NotInTime as error:
            _loaded(client, names, late=True)
            raise ModelUnavailable(spec.name, "not served", str(error)) from error
        yield PrivateFarm(f"http://{HOST}:{port}", redis_url, names, client)


def has_standby(client: SyncRedis, environment: Mapping[str, str] = os.environ) -> bool:
    """True if the host's standby process is ready, or agents of this environment keep none."""
    return not keeps_standby(environment) or membership.standbys(client) == ["ready"]


def _loaded(client: SyncRedis, names: list[str], late: bool = False) -> bool:
    """True if every replica of every model is loaded. Raises ModelUnavailable for one that failed, or is `late`."""
    overviews = [model_overviews.overview(client, name) for name in names]
    states = [(overview.model, replica) for overview in overviews for replica in overview.replicas]
    for model, replica in states:
        if replica.state == "failed" or (late and replica.state != "loaded"):
            raise ModelUnavailable(model, replica.state, f"replica {replica.replica}: {replica.detail}")
    return bool(states) and all(replica.state == "loaded" for _, replica in states)


@contextmanager
def serve(*options: str) -> Generator[subprocess.Popen[str]]:
    """`furrow serve` with these options; its output, with the logs of all parts as JSON, is that of the process."""
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("REDIS_URL")}
    process = subprocess.Popen(
        [sys.executable, "-m", "ops.cli", "serve", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**inherited, "FURROW_LOG_FORMAT": "json", "FURROW_LOG_LEVEL": "info"},
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """SIGTERM; its output is read to the end, or it would wait for a reader."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def log_of(client: SyncRedis, model: str, rid: str) -> list[LogEntry]:
    """The whole log of a request."""
    return [entry for page in read_pages(client, model, rid) for entry in page]


def log_lengths(client: SyncRedis, model: str, rids: Sequence[str]) -> list[int]:
    """Entries in the log of each request."""
    return run_every(client, [read("XLEN", ModelKeys(model).log(rid), parse=int) for rid in rids])


def states(client: SyncRedis, model: str, rids: Sequence[str]) -> list[str | None]:
    """The state of each request; None for one that is not kept."""
    keys = ModelKeys(model)
    return run_every(client, [read("HGET", keys.request(rid), "state", parse=optional_text) for rid in rids])


SENT = ("evalsha", "eval", "xread")
"""The commands that processes send; all others run inside scripts."""


def traffic(client: SyncRedis) -> dict[str, float]:
    """The server's counts so far: commands sent and all, µs in scripts, bytes in and out."""
    stats: Any = client.info("stats")
    commands: Any = client.info("commandstats")
    calls = {name: commands.get(f"cmdstat_{name}", {"calls": 0, "usec": 0}) for name in SENT}
    everything = sum(command["calls"] for command in commands.values())
    return {
        "sent": sum(call["calls"] for call in calls.values()),
        "all": everything,
        "script_us": calls["evalsha"]["usec"] + calls["eval"]["usec"],
        "in": stats["total_net_input_bytes"],
        "out": stats["total_net_output_bytes"],
    }
