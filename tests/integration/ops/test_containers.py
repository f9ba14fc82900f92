"""What the containers would run, run here: Redis with compose's options, and every health check, well and ill."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from control import farm, keys
from control.connection import connect
from control.placement import Host
from control.readiness import wait_until_ready
from tests.integration.ops.cheat_sheet import find_redis_cli
from tests.servers import NEW, OLD, Server, serving
from tests.unit.ops.compose_file import read

PASSWORD = "secret"
REDIS = read(REDIS_PASSWORD=PASSWORD)["services"]["redis"]


@pytest.fixture(scope="module", params=[OLD, NEW], ids=["old", "new"])
def redis_of_compose(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server with the options of compose.yaml, as lines of its configuration."""
    program, *words = REDIS["command"]
    assert program == "redis-server"
    options = [f"{name.removeprefix('--')} {value}" for name, value in zip(words[::2], words[1::2], strict=True)]
    assert f"requirepass {PASSWORD}" in options
    with serving(request.param, *options, password=PASSWORD) as server:
        yield server


def test_redis_as_compose_starts_it_is_fit(redis_of_compose: Server) -> None:
    """Furrow's own check at start has nothing to say, and the append-only file is on."""
    client = connect(redis_of_compose.url)
    said: list[str] = []
    wait_until_ready(client, 5, said.append)
    assert said == []
    assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
    client.close()


@pytest.mark.parametrize(("password", "healthy"), [(PASSWORD, True), ("wrong", False)])
def test_health_of_redis(redis_of_compose: Server, tmp_path: Path, password: str, healthy: bool) -> None:
    """The shell line of the health check, with the variable that compose sets."""
    assert set(REDIS["environment"]) == {"REDISCLI_AUTH"}
    shim = tmp_path / "redis-cli"
    shim.write_text(f'#!/bin/sh\nexec "{find_redis_cli()}" -s "{redis_of_compose.socket}" "$@"\n')
    shim.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDISCLI_AUTH": password}
    kind, line = REDIS["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    assert (subprocess.run(["sh", "-c", line], env=environment, capture_output=True).returncode == 0) == healthy


def check(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=20)


def test_health_of_a_worker(redis_of_compose: Server) -> None:
    """Healthy while its agent beats; otherwise the reason is told."""
    client = connect(redis_of_compose.url)
    environment = {"REDIS_URL": redis_of_compose.url, "FURROW_REDIS_URL": "", "FURROW_HOST_ID": "beta"}
    ill = check("ops.docker.worker_healthy", **environment)
    assert (ill.returncode, ill.stderr) == (1, "the agent of host beta does not beat\n")
    farm.beat_host(client, Host("beta"), pid=1, memory_bytes=1)
    client.pexpire(keys.host("beta"), 60_000)
    well = check("ops.docker.worker_healthy", **environment)
    assert (well.returncode, well.stderr) == (0, "")
    client.close()


def test_health_of_a_worker_whose_redis_is_away(tmp_path: Path) -> None:
    """Not healthy, and the message names Redis."""
    ill = check("ops.docker.worker_healthy", REDIS_URL=f"unix://{tmp_path}/none.sock", FURROW_REDIS_URL="")
    assert ill.returncode == 1
    assert "can't be reached" in ill.stderr


class Health(http.server.BaseHTTPRequestHandler):
    """Healthy at /health, ill everywhere else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_health_of_an_api() -> None:
    """Healthy at 200; an error status and nobody there are told."""
    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        assert check("ops.docker.api_healthy", f"{base}/health").returncode == 0
        refused = check("ops.docker.api_healthy", f"{base}/other")
        server.shutdown()
    assert refused.returncode == 1
    assert "503" in refused.stderr
    gone = check("ops.docker.api_healthy", f"{base}/health")
    assert gone.returncode == 1
    assert "refused" in gone.stderr
