"""A whole farm for tests: the real `furrow serve` as a subprocess, with its private server, agent, ranks and API."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from control.redis.clients import connect
from tests.waiting import until

READY_WITHIN_S = 120.0
STOP_WITHIN_S = 60.0


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without a Redis that happens to be set, one thread per rank, no hub."""
    environment = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "FURROW_REDIS_URL")}
    return environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | extra


def furrow(*arguments: str, timeout: float = 60.0, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the furrow command to its end."""
    command = [sys.executable, "-m", "ops.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=clean_environment(**extra))


@dataclass
class Farm:
    """A running `furrow serve`. `address` is host:port of the API, `redis` a client of its private server."""

    process: subprocess.Popen[str]
    address: str
    redis: redis.Redis
    redis_url: str
    log: Path

    @property
    def base_url(self) -> str:
        return f"http://{self.address}/v1"

    def pid(self, model: str, rank: int, replica: str = "r0") -> int:
        """The rank's process, as its heartbeat says."""
        return int(until(lambda: self.redis.hget(f"furrow:{{{model}}}:{replica}:hb:{rank}", "pid")))

    def kill(self, model: str, rank: int, how: signal.Signals = signal.SIGKILL) -> int:
        """Send `how` to a rank and return its pid."""
        pid = self.pid(model, rank)
        os.kill(pid, how)
        return pid

    def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON of a GET."""
        connection = http.client.HTTPConnection(self.address, timeout=30)
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, json.loads(body) if body.startswith((b"{", b"[")) else body.decode()

    def ready(self) -> bool:
        """True if /ready says so, which takes every rank of the current epoch."""
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def processes(self) -> list[int]:
        """Every process of the farm, the parent included."""
        import psutil

        parent = psutil.Process(self.process.pid)
        return [parent.pid, *(child.pid for child in parent.children(recursive=True))]

    def furrow(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a furrow verb against this farm's Redis."""
        return furrow(*arguments, REDIS_URL=self.redis_url)

    def stop(self) -> int:
        """Stop as Ctrl-C does; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_WITHIN_S)


@contextmanager
def serving_farm(*arguments: str, redis_url: str | None = None, **extra: str) -> Iterator[Farm]:
    """`furrow serve` with these arguments on a free port, ready; its log is shown when the block fails.

    Without `redis_url` it starts a private server of its own.
    """
    with tempfile.TemporaryDirectory(prefix="furrow-farm-") as folder:
        data, log = Path(folder) / "data", Path(folder) / "log"
        command = [
            sys.executable,
            "-m",
            "ops.cli",
            "serve",
            *arguments,
            "--port",
            "0",
            "--verbose",
            "--data",
            str(data),
        ]
        command += ["--redis", redis_url] if redis_url else []
        with log.open("w") as sink:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=sink, text=True, env=clean_environment(**extra)
            )
        try:
            address = _wait_for_address(process, log)
            url = redis_url or (data / "url").read_text().strip()
            with connect(url) as client:
                yield Farm(process, address, client, url, log)
        except BaseException:
            print(log.read_text()[-12000:], file=sys.stderr)
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(STOP_WITHIN_S)
                except subprocess.TimeoutExpired:
                    process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _wait_for_address(process: subprocess.Popen[str], log: Path) -> str:
    limit = threading.Timer(READY_WITHIN_S, process.kill)
    limit.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if match := re.search(r"http://([^/\s]+)/v1", line):
                return match[1]
    finally:
        limit.cancel()
    raise AssertionError(f"furrow serve ended or was not ready: {log.read_text()[-6000:]}")
