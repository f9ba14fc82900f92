"""Debian's Prometheus: its promtool, and a server that scrapes a farm for a test."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.programs import absent
from tests.rooms import ROOT
from tests.waiting import until

RULES = ROOT / "ops" / "prometheus" / "rules.yaml"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`. Skips the test where there is none; in CI that fails."""
    program = shutil.which(name)
    if program is None:
        absent("prometheus", f"{name} is not installed: apt-get install prometheus")
    return program


def promtool(*arguments: str | Path, stdin: str = "") -> tuple[int, str]:
    """Exit status and output of promtool."""
    command = [program("promtool"), *map(str, arguments)]
    ended = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=50)
    return ended.returncode, ended.stdout + ended.stderr


@dataclass(frozen=True)
class Prometheus:
    """A running server. `address` is host:port."""

    address: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query, each with `metric` and `value`. Raises ValueError with the message."""
        return self._get("/api/v1/query", query=expression)["result"]

    def series(self, selector: str) -> list[dict[str, str]]:
        """The labels of each series that the selector finds."""
        return self._get("/api/v1/series", **{"match[]": selector})

    def metadata(self) -> dict[str, list[dict[str, str]]]:
        """Type and help of each metric, by its name without `_total`."""
        return self._get("/api/v1/metadata")

    def rules(self) -> list[dict[str, Any]]:
        """Each rule with its state and health."""
        return [rule for group in self._get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(f"{parameters}: {error.read().decode()}") from error


@contextmanager
def scraping(folder: Path, jobs: Mapping[str, Sequence[str]]) -> Generator[Prometheus]:
    """A server with the rules of ops/prometheus that scrapes the targets of each job once a second."""
    command = [program("prometheus")]
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }
    file, log = folder / "prometheus.yaml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(configuration))
    command += [f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        until(lambda: _answers(process, address, log), 30.0)
        yield Prometheus(address)
    finally:
        process.kill()
        process.wait()


def _answers(process: subprocess.Popen[bytes], address: str, log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5):
            return True
    except OSError:
        return False
