"""The containers' commands and health checks work: run here, Redis by compose's command, and every check well and
ill."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from control import keys
from control.placement import membership
from control.placement.placement import Host
from control.redis.connection import connect
from control.redis.servers import wait_until_ready
from tests.integration.ops.cheat_sheet import find_redis_cli
from tests.servers import NEW, OLD, Server
from tests.unit.ops.compose_file import read

PASSWORD = "hunter2OfCompose"
REDIS = read(REDIS_PASSWORD=PASSWORD)["services"]["redis"]


@pytest.fixture(scope="module", params=[OLD, NEW], ids=["old", "new"])
def redis_of_compose(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that the shell line of compose.yaml has started; it listens on a socket of its own."""
    folder = tmp_path_factory.mktemp("redis")
    server = Server(request.param, folder, PASSWORD)
    listening = f'--port 0 --unixsocket "{server.socket}" --dir "{folder}"'
    # As in the images, where it gives up the rights of root before it becomes the server.
    program(folder / "docker-entrypoint.sh", 'exec "$@"')
    program(folder / "redis-server", f'exec "{request.param}" "$@" {listening}')
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **REDIS["environment"]}
    server.process = subprocess.Popen(REDIS["command"], env=environment, stdout=subprocess.DEVNULL)
    try:
        server.wait_until_it_answers()
        yield server
    finally:
        server.stop()


def program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def test_no_command_line_in_the_container_of_redis_shows_the_password(redis_of_compose: Server) -> None:
    """The shell has become the server, which therefore gets the container's signals."""
    assert redis_of_compose.process is not None
    server = psutil.Process(redis_of_compose.process.pid)
    assert PASSWORD not in " ".join([*REDIS["command"], *server.cmdline()])
    assert (server.children(), "redis.sock" in " ".join(server.cmdline())) == ([], True)
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis(unix_socket_path=str(redis_of_compose.socket), retry=Retry(NoBackoff(), 0)).ping()


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
def test_the_health_check_of_redis_runs_in_a_shell(
    redis_of_compose: Server, tmp_path: Path, password: str, healthy: bool
) -> None:
    """The shell line of the health check, with the variable that compose sets."""
    assert set(REDIS["environment"]) == {"REDISCLI_AUTH"}
    program(tmp_path / "redis-cli", f'exec "{find_redis_cli()}" -s "{redis_of_compose.socket}" "$@"')
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
    membership.beat_host(client, Host("beta"), pid=1, memory_bytes=1)
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
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        assert check("ops.docker.api_healthy", f"{base}/health").returncode == 0
        refused = check("ops.docker.api_healthy", f"{base}/other")
        server.shutdown()
    assert refused.returncode == 1
    assert "503" in refused.stderr
    gone = check("ops.docker.api_healthy", f"{base}/health")
    assert gone.returncode == 1
    assert "refused" in gone.stderr
