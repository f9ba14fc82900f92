"""A host is upgraded between two builds: a link is repointed, and SIGUSR2 starts what the command names."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from control.redis.clients import connect
from tests.farm import clean_environment
from tests.servers import NEW, Server, serving
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
WITHIN_S = 40.0


@dataclass
class Builds:
    """Two environments with a build each, and a link that leads to one of them."""

    folder: Path
    versions: list[str]

    @property
    def link(self) -> Path:
        return self.folder / "furrow"

    def point(self, number: int) -> None:
        """Let the link lead to build 0 or 1, in one step."""
        fresh = self.folder / "fresh"
        fresh.symlink_to(self.folder / f"build-{number}")
        fresh.replace(self.link)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Made as a user makes them, from sources that differ in one line. Their dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("builds")
    making = [_make(folder, number) for number in (0, 1)]
    for process in making:
        assert process.wait(120) == 0
    for number in (0, 1):
        _install(folder, number)
    return Builds(folder, [_says(folder / f"build-{number}/bin/furrow", "--version") for number in (0, 1)])


def _make(folder: Path, number: int) -> subprocess.Popen[bytes]:
    """Build a wheel."""
    source, wheel = folder / f"source-{number}", folder / f"wheel-{number}"
    wheel.mkdir()
    for name in ("api", "control", "ops", "worker"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, source)
    with (source / "control/process.py").open("a") as module:
        module.write(f"# build {number}\n")
    with (folder / f"log-{number}").open("w") as log:
        return subprocess.Popen([sys.executable, "-c", BUILD, str(wheel)], cwd=source, stdout=log, stderr=log)


def _install(folder: Path, number: int) -> None:
    """Into an environment of its own."""
    place = folder / f"build-{number}"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    [packages] = place.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    [wheel] = (folder / f"wheel-{number}").iterdir()
    options = [
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--disable-pip-version-check",
        "--ignore-installed",
    ]
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin/python"), "install", *options, str(wheel)]
    subprocess.run(pip, check=True)


def _says(*command: str | Path) -> str:
    """The last word of what a command prints."""
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=clean_environment())
    return run.stdout.split()[-1]


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(NEW) as server:
        yield server


@contextmanager
def worker(command: Sequence[str | Path], server: Server) -> Iterator[subprocess.Popen[bytes]]:
    """A worker without devices or models."""
    environment = clean_environment(FURROW_METRICS="off", FURROW_STANDBY="0")
    arguments = ["worker", "--host-id", "h", "--redis", server.url]
    process = subprocess.Popen([*command, *arguments], env=environment, cwd="/")
    try:
        yield process
    finally:
        process.terminate()
        process.wait(WITHIN_S)


@pytest.mark.parametrize("form", ["script", "module"])
def test_the_new_build_is_started(builds: Builds, server: Server, form: str) -> None:
    """Without a new link the old build is started again, which the doctor tells."""
    commands: dict[str, list[str | Path]] = {
        "script": [builds.link / "bin/furrow"],
        "module": [builds.link / "bin/python", "-m", "ops.cli"],
    }
    assert builds.versions[0] != builds.versions[1]
    builds.point(0)
    with connect(server.url) as client, worker(commands[form], server) as process:
        beat = lambda: client.hmget("furrow:host:h", "pid", "version")  # noqa: E731
        first, version = until(lambda: beat() if beat()[0] else None, WITHIN_S)
        assert version == builds.versions[0]
        if form == "script":
            process.send_signal(signal.SIGUSR2)
            again = until(lambda: beat() if beat()[0] not in (None, first) else None, WITHIN_S)
            assert again[1] == builds.versions[0]
            first = again[0]
        builds.point(1)
        if form == "script":
            doctor = _doctor(builds, server)
            assert builds.versions[0] in doctor["message"] and builds.versions[1] in doctor["message"]
            assert f"`{builds.link}/bin/furrow` on h" in doctor["remedy"]
        process.send_signal(signal.SIGUSR2)
        until(lambda: beat()[1] == builds.versions[1] and beat()[0] != first, WITHIN_S)
        if form == "script":
            assert _doctor(builds, server)["level"] == "ok"


def _doctor(builds: Builds, server: Server) -> dict[str, str]:
    """What the doctor of the linked build finds about versions."""
    command = [builds.link / "bin/furrow", "doctor", "--json", "--redis", server.url]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=clean_environment()).stdout
    [found] = [one for one in json.loads(said)["findings"] if one["check"] == "version" and one["subject"] == "hosts"]
    return found


def test_a_build_that_does_not_start_ends_no_rank(builds: Builds, server: Server, tmp_path: Path) -> None:
    """After three failures the supervisor starts its own build's agent again."""
    builds.point(0)
    with connect(server.url) as client, worker([builds.link / "bin/furrow"], server) as process:
        pid = until(lambda: client.hget("furrow:host:h", "pid"), WITHIN_S)
        _broken(builds.folder, tmp_path).replace(builds.link)
        process.send_signal(signal.SIGUSR2)
        until(lambda: client.hget("furrow:host:h", "pid") not in (None, pid), WITHIN_S)
        assert client.hget("furrow:host:h", "version") == builds.versions[0]
        assert process.poll() is None


def _broken(folder: Path, scratch: Path) -> Path:
    """A link to an environment whose command fails."""
    command = scratch / "bin/furrow"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\nexit 1\n")
    command.chmod(0o755)
    link = folder / "broken"
    link.symlink_to(scratch)
    return link
