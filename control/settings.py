"""Settings from the environment, each with its default in one place. Command-line options override them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from control.errors import SettingsError
from control.sizes import parse_size

LogFormat = Literal["auto", "json", "console"]


def keeps_standby(environment: Mapping[str, str] = os.environ) -> bool:
    """True if agents that are started in this environment keep a standby process. Linux only: elsewhere a fork of a
    process with a rank's libraries is not safe."""
    return sys.platform == "linux" and environment.get("FURROW_STANDBY") != "0"


def host_id() -> str:
    """This host's name in the farm: FURROW_HOST_ID, else the machine's."""
    return os.environ.get("FURROW_HOST_ID") or os.uname().nodename


def demo_model() -> Path | None:
    """The folder of the demonstration model, FURROW_DEMO_MODEL; None if unset. The `furrow` command sets it."""
    named = os.environ.get("FURROW_DEMO_MODEL")
    return Path(named) if named else None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that every process of the farm reads from its environment."""

    redis_url: str
    """A URL, or the absolute path of the file that holds it: `connect` takes either."""
    redis_wait_s: float = 30.0
    """Limit of the wait for Redis at the start, during which a message is shown."""
    log_format: LogFormat = "auto"
    log_level: str = "info"
    standby: bool = True
    """True: an agent keeps a process from which ranks are forked, and whose memory they share."""
    shared_memory: bool = True
    """True: ranks on the CPUs of one host exchange through shared memory instead of sockets."""
    weight_cache_bytes: int = 50 * 2**30
    """Limit of the packed weights that this host keeps in its cache folder; 0 keeps none."""
    memory_bytes: int | None = None
    """The most that the ranks of this host may have together; None: what its control group or the machine has, but a
    reserve; 0: their memory is not planned."""
    metrics: str | None = None
    """HOST:PORT of the agent's /metrics, or `off`; None: the default."""
    has_parent: bool = False
    """Started by another Furrow process, with which this one must end."""

    @classmethod
    def from_environment(cls) -> Settings:
        """Read FURROW_REDIS_URL (else REDIS_URL) and FURROW_ REDIS_WAIT, LOG_FORMAT, LOG_LEVEL, STANDBY, SHARED_MEMORY,
        WEIGHT_CACHE, MEMORY, METRICS.

        Raises SettingsError naming the variable, its value and what is accepted.
        """
        awaited = os.environ.get(REDIS_AWAITED) == "1"
        url = redis_url_from_environment(awaited)
        if url is None:
            raise SettingsError(f"no Redis is named: set REDIS_URL or give {NAMING}")
        log_format = os.environ.get("FURROW_LOG_FORMAT") or "auto"
        if log_format not in ("auto", "json", "console"):
            raise SettingsError(f"FURROW_LOG_FORMAT={log_format!r} is unknown: use auto, json or console")
        standby = os.environ.get("FURROW_STANDBY") or "1"
        if standby not in ("0", "1"):
            raise SettingsError(
                f"FURROW_STANDBY={standby!r} is unknown: use 1 to fork ranks from a standby process, 0 for none"
            )
        shared_memory = os.environ.get("FURROW_SHARED_MEMORY") or "1"
        if shared_memory not in ("0", "1"):
            raise SettingsError(f"FURROW_SHARED_MEMORY={shared_memory!r} is unknown: use 1 to share memory, 0 not to")
        return cls(
            redis_url=url,
            redis_wait_s=redis_wait_s(),
            log_format=log_format,
            log_level=log_level(),
            standby=keeps_standby(),
            shared_memory=shared_memory == "1",
            weight_cache_bytes=weight_cache_bytes(),
            memory_bytes=memory_bytes(),
            metrics=os.environ.get("FURROW_METRICS") or None,
            has_parent="FURROW_PARENT" in os.environ,
        )


def log_level(default: str = "info") -> str:
    """FURROW_LOG_LEVEL. Raises SettingsError."""
    level = (os.environ.get("FURROW_LOG_LEVEL") or default).lower()
    if level not in ("debug", "info", "warning", "error", "critical"):
        raise SettingsError(f"FURROW_LOG_LEVEL={level!r} is unknown: use debug, info, warning, error or critical")
    return level


def memory_bytes() -> int | None:
    """FURROW_MEMORY, a size such as 12GiB, in bytes; 0 for `off`, None if unset. Raises SettingsError."""
    named = os.environ.get("FURROW_MEMORY")
    if named == "off":
        return 0
    try:
        return parse_size(named) if named else None
    except SettingsError as error:
        raise SettingsError(f"FURROW_MEMORY (--memory): {error}") from error


NAMING = "--redis URL, a file that holds the URL, or the data folder of a `furrow serve` that runs here"
"""The ways to name a Redis, on the command line and in the environment."""
_LOOK_EVERY_S = 0.01
_URL_FILE = "url"
"""File in the data folder of a private server, while it runs."""


REDIS_AWAITED = "FURROW_REDIS_AWAITED"
"""Environment variable: 1 where the parent starts the private server that FURROW_REDIS_URL names at the same time."""


def redis_url_from_environment(awaited: bool = False) -> str | None:
    """FURROW_REDIS_URL, else REDIS_URL, as `redis_reference`; None where both are empty or unset. Raises as
    `redis_url`, unless the URL is `awaited`: then its file may be missing."""
    named = os.environ.get("FURROW_REDIS_URL") or os.environ.get("REDIS_URL")
    if not named:
        return None
    if not awaited:
        redis_url(named)
    return redis_reference(named)


def wait_for_url(named: str, seconds: float) -> None:
    """Return once `redis_url` has an answer; where REDIS_AWAITED is 1, it may take so many seconds. Raises
    SettingsError."""
    deadline = time.monotonic() + seconds
    while os.environ.get(REDIS_AWAITED) == "1" and time.monotonic() < deadline:
        try:
            redis_url(named)
            return
        except SettingsError:
            time.sleep(_LOOK_EVERY_S)
    redis_url(named)


def redis_url(named: str) -> str:
    """The URL itself, or the one in a file or in a private server's data folder. Raises SettingsError.

    A path keeps the password out of command lines, which every user of the machine can read.
    """
    if "://" in named:
        return named
    path = Path(named).expanduser()
    file = path / _URL_FILE if path.is_dir() else path
    try:
        url = file.read_text().strip()
    except FileNotFoundError:
        why = "no private server runs on that folder" if path.is_dir() else "there is no such file or folder"
        raise SettingsError(f"--redis {named}: {why}. Give {NAMING}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--redis {named}: {file} can't be read ({error}). Give {NAMING}") from error
    if "://" not in url:
        raise SettingsError(f"--redis {named}: {file} holds no URL such as redis://host:port/0")
    return url


def redis_reference(named: str) -> str:
    """`named` as other processes may be told it, whatever their working folder: a URL, or an absolute path.

    Links stay in the path: a mounted secret, as in Kubernetes, is a link to another folder after each change.
    """
    return named if "://" in named else str(Path(named).expanduser().absolute())


def redis_wait_s() -> float:
    """FURROW_REDIS_WAIT in seconds, 30 if unset."""
    value = os.environ.get("FURROW_REDIS_WAIT") or "30"
    try:
        return float(value)
    except ValueError:
        raise SettingsError(f"FURROW_REDIS_WAIT={value!r} is not a number of seconds") from None


def weight_cache_bytes() -> int:
    """FURROW_WEIGHT_CACHE, a number of GiB, in bytes; 50 GiB if unset."""
    value = os.environ.get("FURROW_WEIGHT_CACHE") or "50"
    try:
        gibibytes = float(value)
    except ValueError:
        gibibytes = -1.0
    if not 0 <= gibibytes < 2**20:
        raise SettingsError(
            f"FURROW_WEIGHT_CACHE={value!r} is no number of GiB: use the limit of packed weights, such as 50, or 0 to "
            "keep none"
        )
    return int(gibibytes * 2**30)
