"""A private farm for a scenario: a server of its own, one agent, one API, and as many replicas as the scenario asks."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from control.errors import ModelUnavailable
from control.listening import free_port
from control.messages import ModelSpec
from control.placement import farm
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from control.replicas import health
from control.settings import keeps_standby
from ops.local.embedded import EmbeddedServer
from ops.local.ready import is_ready
from ops.local.supervisor import Part, Supervisor

TICK_S = 0.2
START_LIMIT_S = 300.0
HOST = "127.0.0.1"
NOBODY_REFUSED = ("--max-queue-wait", "0")
"""Options of an API that lets everybody wait; `python -m ops.bench.load.overload` measures refusing."""


def say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


@contextmanager
def private_farm(
    spec: ModelSpec, replicas: tuple[int, ...], *api_options: str, environment: Mapping[str, str] | None = None
) -> Generator[tuple[str, str, list[str]]]:
    """Serve `spec` once per number in `replicas`, under names of their own; yields the API's URL, Redis's, the names.

    `api_options` are those of `furrow api`; `environment` is added to that of agent and API. The parts log errors only,
    unless FURROW_LOG_LEVEL says otherwise. Where a standby is kept it waits for work too, as its imports are over then.
    Raises ModelUnavailable where a replica can't be served.
    """
    names = [spec.name] if len(replicas) == 1 else [f"{spec.name}-{index + 1}" for index in range(len(replicas))]
    with ExitStack() as stack:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="furrow-bench-")))
        redis_url = stack.enter_context(EmbeddedServer(data))
        client = connect(redis_url)
        stack.callback(client.close)
        for name, count in zip(names, replicas, strict=True):
            catalog.put_spec(client, msgspec.structs.replace(spec, name=name, replicas=count))
        port = free_port(HOST, 0)
        level = os.environ.get("FURROW_LOG_LEVEL") or "error"
        settings = {"FURROW_REDIS_URL": redis_url, "FURROW_LOG_LEVEL": level}
        supervisor = Supervisor({**(environment or {}), **settings}, say)
        stack.callback(supervisor.stop)
        supervisor.start(Part("worker", "worker.agent.supervision", []))
        supervisor.start(Part("api", "api", ["--host", HOST, "--port", str(port), *api_options]))
        kept = keeps_standby({**os.environ, **(environment or {})})
        _wait(client, names, (HOST, port), supervisor, kept)
        yield f"http://{HOST}:{port}", redis_url, names


def _wait(client: SyncRedis, names: list[str], address: tuple[str, int], supervisor: Supervisor, standby: bool) -> None:
    """Until every replica of every model is loaded, the API is ready, and the standby too where one is kept."""
    until = time.monotonic() + START_LIMIT_S
    while True:
        supervisor.tend()
        overviews = [health.overview(client, name) for name in names]
        states = [(overview.model, replica) for overview in overviews for replica in overview.replicas]
        for model, replica in states:
            if replica.state == "failed" or time.monotonic() > until:
                raise ModelUnavailable(model, replica.state, f"replica {replica.replica}: {replica.detail}")
        loaded = states and all(replica.state == "loaded" for _, replica in states)
        if loaded and is_ready(address) and (not standby or farm.standbys(client) == ["ready"]):
            return
        time.sleep(TICK_S)
