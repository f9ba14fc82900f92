"""The agent serves /metrics and /health: as a scraper and a hostile client meet them."""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from control.errors import SettingsError
from control.messages import ModelSpec
from control.operations import desired
from control.placement import membership
from control.placement.placement import Host
from control.records import catalog
from control.redis.connection import run
from control.replicas.health import AgentState, write_poison, write_status
from control.replicas.lease import acquire
from tests.farm import clean_environment
from tests.integration.worker.conftest import ReplicaRedis
from worker.agent.metrics import FarmCollector
from worker.agent.metrics_server import MetricsServer, parse_address
from worker.rank.counters import SHARED_MEMORY

Start = Callable[..., MetricsServer]


@pytest.fixture
def serve() -> Iterator[Start]:
    servers: list[MetricsServer] = []

    def start(registry: CollectorRegistry | None = None, body: dict[str, Any] | None = None) -> MetricsServer:
        server = MetricsServer("127.0.0.1", 0, registry or CollectorRegistry(), lambda: body or {"ok": True})
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


def get(server: MetricsServer, path: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"http://{server.address}{path}", method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_paths(serve: Start) -> None:
    """Two paths are answered, by GET alone; what is asked for is not repeated in the answer."""
    server = serve()
    assert get(server, "/metrics")[0] == 200
    assert get(server, "/health") == (200, '{"ok": true}')
    status, text = get(server, "/<script>")
    assert status == 404 and "script" not in text
    assert get(server, "/metrics", "POST")[0] == 405
    assert get(serve(body={"ok": False}), "/health")[0] == 503


def test_names_are_the_same_for_each_client(serve: Start) -> None:
    """Prometheus asks for OpenMetrics, and for gzip."""
    registry = CollectorRegistry()
    Gauge("vllm:waiting", "x", registry=registry).set(3)
    server = serve(registry)
    accepted = {"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1", "Accept-Encoding": "gzip"}
    for headers in (accepted, {}):
        with urllib.request.urlopen(urllib.request.Request(f"http://{server.address}/metrics", headers=headers)) as got:
            body, coding = got.read(), got.headers["content-encoding"]
        assert b"\nvllm:waiting 3.0\n" in (gzip.decompress(body) if coding == "gzip" else body)
        assert coding == headers.get("Accept-Encoding")


def test_a_client_that_says_nothing_delays_no_scrape(serve: Start) -> None:
    """Each connection has a thread: the idle ones hold none of the others up."""
    server = serve()
    host, port = server.address.split(":")
    idle = [socket.create_connection((host, int(port))) for _ in range(50)]
    try:
        began = time.monotonic()
        assert get(server, "/health")[0] == 200 and time.monotonic() - began < 4.0
    finally:
        for one in idle:
            one.close()


@pytest.mark.parametrize("text", ["9464", "host:", ":1", "a:b", "127.0.0.1:70000", "http://x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    """By name, with what is accepted."""
    with pytest.raises(SettingsError, match="HOST:PORT"):
        parse_address(text)


def test_addresses() -> None:
    """IPv4, IPv6 in brackets, a name, and none."""
    assert parse_address("0.0.0.0:1") == ("0.0.0.0", 1) and parse_address("[::1]:2") == ("::1", 2)
    assert parse_address("localhost:0") == ("localhost", 0) and parse_address("off") is None


def test_a_port_in_use_that_was_asked_for(serve: Start, redis: ReplicaRedis) -> None:
    """`furrow worker` ends with status 1, names it, and leaves no folder for counters."""
    address = serve().address
    environment = clean_environment(FURROW_REDIS_URL=redis.url)
    command = [sys.executable, "-m", "ops.cli", "worker", "--host-id", "lonely", "--metrics", address]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as worker:
        _, told = worker.communicate(timeout=50)
    assert worker.returncode == 1 and f"can't listen on {address}" in told, told
    roots = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    assert not [one for root in roots for one in root.glob(f"furrow-counters-{worker.pid}-*")]


def test_a_name_in_use(redis: ReplicaRedis) -> None:
    """A second worker under the name of one that beats ends with status 1; the heartbeat of one that ended lapses."""
    host = Host("twin", ())
    began = time.monotonic()
    membership.beat_host(redis.client, host, pid=77, memory_bytes=1)
    membership.check_name(redis.client, host.id)
    waited = time.monotonic() - began
    assert waited > 0.5 and not redis.client.exists("furrow:host:twin"), (
        "the heartbeat of a worker that has ended is waited for"
    )
    membership.check_name(redis.client, host.id)
    membership.beat_host(redis.client, host, pid=77, memory_bytes=1)
    redis.client.pexpire("furrow:host:twin", 60_000)
    environment = clean_environment(FURROW_REDIS_URL=redis.url)
    command = [sys.executable, "-m", "ops.cli", "worker", "--host-id", host.id, "--metrics", "off"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as worker:
        _, told = worker.communicate(timeout=50)
    assert worker.returncode == 1 and "another worker runs as host 'twin'" in told and "--host-id" in told, told


def shown(client: Any, plans: bool) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(FarmCollector(client, lambda: plans))
    server = MetricsServer("127.0.0.1", 0, registry, dict)
    server.start()
    try:
        text = get(server, "/metrics")[1]
    finally:
        server.stop()
    return {
        " ".join(
            [sample.name, *(sample.labels[one] for one in ("kind", "state") if one in sample.labels)]
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_farm_s_series(redis: ReplicaRedis) -> None:
    """The state of models and hosts in Redis; nothing where this agent does not plan."""
    client = redis.client
    catalog.put_spec(client, ModelSpec(name="tiny", source="/x", replicas=2))
    desired.pause(client, "tiny", paused=True)
    membership.beat_host(client, Host("alpha", ()), pid=1, memory_bytes=1)
    lease = run(client, acquire("tiny", "r0", "me", 1))
    assert lease is not None
    write_poison(client, "tiny", "r0", lease.epoch, 0, "step_failed", "boom")
    output = shown(client, plans=True)
    expected = {
        "vllm:num_requests_waiting": 0,
        "furrow_replicas_wanted": 2,
        "furrow_replicas_serving": 0,
        "furrow_replicas_unplaced": 2,
        "furrow_model_paused": 1,
        "furrow_dead_letters": 0,
        "furrow_expected_wait_seconds": 0,
        "furrow_epochs_total": 1,
        "furrow_poisons_total step_failed": 1,
        "furrow_hosts alive": 1,
        "furrow_host_up": 1,
        "furrow_hosts away": 0,
    }
    assert {name: output[name] for name in expected} == expected
    assert shown(client, plans=False) == {}


@pytest.mark.parametrize(
    ("state", "failed", "unplaced"), [("unplaceable", 0, 1), ("failed", 1, 0), ("running", 0, 0), ("", 0, 1)]
)
def test_replicas_that_do_not_serve(redis: ReplicaRedis, state: AgentState, failed: int, unplaced: int) -> None:
    """One that no host has room for is unplaced and not given up."""
    client = redis.client
    catalog.put_spec(client, ModelSpec(name="tiny", source="/x", replicas=1))
    if state:
        write_status(client, "tiny", "r0", state, "why", host="alpha")
    output = shown(client, plans=True)
    assert (output["furrow_replicas_failed"], output["furrow_replicas_unplaced"]) == (failed, unplaced)
