"""An API process, a scripted leader and a private server, shared by the tests of one module."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from control.process import child_environment
from control.redis.connection import connect
from tests.leader import ScriptedLeader
from tests.servers import NEW, Server, serving
from tests.waiting import until
from tests.warm import Forked, warm

IN_A_HURRY = {
    "api.background.completion.EVERY_S": 0.3,
    "api.background.orphans.EVERY_S": 0.2,
    "api.background.orphans.LOOK_FOR_GONE_EVERY_S": 0.3,
}
"""Constants of a process whose rounds come more often; only of one that is a fork."""


class ApiProcess:
    """`python -m api`; its log lines are JSON. It begins as a fork of a process that has imported it, unless `cold`."""

    def __init__(
        self,
        redis_url: str,
        folder: Path,
        *options: str,
        port: int = 0,
        cold: bool = False,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"api-{self.port}.log"
        self.process: subprocess.Popen[bytes] | Forked
        self._arguments = ["--redis", redis_url, "--port", str(self.port), *options]
        self._cold = cold or sys.platform != "linux"
        self._constants = constants
        self.start()

    def start(self) -> None:
        """Start it, again after its death: its address stays."""
        with self.log.open("a") as log:
            environment = child_environment(FURROW_LOG_FORMAT="json")
            if self._cold:
                command = [sys.executable, "-m", "api", *self._arguments]
                self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
            else:
                self.process = warm("api.__main__").start(self._arguments, environment, log, self._constants)
        until(self._answers, 40)

    def kill(self) -> None:
        """End it as SIGKILL does."""
        self.process.kill()
        self.process.wait(40)

    def _answers(self) -> bool:
        """Asked while the process starts: without httpx, whose clients take as much of the processor as the start."""
        assert self.process.poll() is None, self.log.read_text()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=40)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [msgspec.json.decode(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def ended(self, rid: str) -> list[dict[str, Any]]:
        """The terminal lines of one request."""
        return [line for line in self.lines if line.get("action") == "request_ended" and line.get("rid") == rid]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(40)


@contextmanager
def running_api(
    redis_url: str,
    folder: Path,
    *options: str,
    port: int = 0,
    cold: bool = False,
    constants: Mapping[str, float] | None = None,
) -> Iterator[ApiProcess]:
    api = ApiProcess(redis_url, folder, *options, port=port, cold=cold, constants=constants)
    try:
        yield api
    finally:
        api.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(NEW) as server:
        yield server


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    leader = ScriptedLeader(server.url)
    leader.start()
    yield leader
    leader.stop()


@pytest.fixture
def leader(leader_of_module: ScriptedLeader) -> Iterator[ScriptedLeader]:
    """The module's leader with the default script."""
    leader_of_module.reset()
    yield leader_of_module
    leader_of_module.reset()


@pytest.fixture(scope="module")
def api(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    with running_api(server.url, tmp_path_factory.mktemp("api")) as process:
        yield process


@pytest.fixture
def client(api: ApiProcess) -> Iterator[openai.OpenAI]:
    """The official client, without retries, so that a refusal is seen as it is."""
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="secret", max_retries=0, timeout=40) as client:
        yield client


@pytest.fixture
def http(api: ApiProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, headers={"cache-control": "no-cache"}, timeout=40) as client:
        yield client


@pytest.fixture
def redis_client(server: Server) -> Iterator[Any]:
    client = connect(server.url)
    yield client
    client.close()
