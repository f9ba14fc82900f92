"""The external engines that a host offers, and the process of one.

The operator of a host says how an engine is started there, by options of `furrow worker`; a model's specification
never does.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from control.cache import folder
from control.engines import ENGINES, how_to_offer
from control.errors import SettingsError
from control.messages import ModelSpec
from control.placement.need import ModelNeed, RankNeed
from control.settings import host_id
from worker.external.engine import Address, ExternalEngine, Launch
from worker.external.llama_server import LlamaServer
from worker.external.sglang import Sglang
from worker.external.vllm import Vllm

VARIABLE = "FURROW_ENGINES"
"""Environment variable of a worker: the settings of each engine by its name, as JSON."""
ADDRESS_VARIABLE = "FURROW_ENGINE_ADDRESS"
"""Environment variable of a leader: where its engine listens."""
CLASSES: Mapping[str, type[ExternalEngine]] = {engine.name: engine for engine in (Vllm, Sglang, LlamaServer)}
LAST_LINES = 4
"""Of an engine's log, without the indented ones of a traceback: they say why it ended."""
LAST_BYTES = 8192
_SECRET = ("FURROW_", "REDIS_URL", "OPENAI_", "ANTHROPIC_", "HF_TOKEN", "HUGGING_FACE_")
"""Beginnings of variables that no engine gets."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings by which a host runs one engine."""

    command: list[str] = []
    """The program with its first arguments."""
    by_module: bool = False
    """True if it is a Python with the engine's module."""
    url: str = ""
    """Of a server that runs already, and is not this host's to start."""
    memory: int | None = None
    """Bytes that one of its processes may take."""


def engine_settings(environment: Mapping[str, str] = os.environ) -> dict[str, EngineSettings]:
    """The engines of this host: those that the operator named, and those whose program is on the PATH. Raises
    SettingsError."""
    return _offered(environment.get(VARIABLE) or "{}", environment.get("PATH"))


@functools.lru_cache(maxsize=4)
def _offered(named_text: str, path: str | None) -> dict[str, EngineSettings]:
    try:
        settings_by_name = msgspec.json.decode(named_text, type=dict[str, EngineSettings])
    except msgspec.DecodeError as error:
        raise SettingsError(f"{VARIABLE} can't be read: {error}. Use the options of `furrow worker`.") from error
    offered: dict[str, EngineSettings] = {}
    for name, engine in ENGINES.items():
        settings = settings_by_name.get(name, EngineSettings())
        if (
            not settings.command
            and not settings.url
            and engine.program
            and (program := shutil.which(engine.program, path=path))
        ):
            settings = msgspec.structs.replace(settings, command=[program])
        if settings.command or settings.url:
            offered[name] = settings
    return offered


def settings_of(name: str) -> EngineSettings:
    """Of an engine on this host. Raises SettingsError where the host does not offer it."""
    settings = engine_settings().get(name)
    if settings is None:
        raise SettingsError(f"host {host_id()} does not offer the engine {name}: {how_to_offer(name)}")
    return settings


def engine_need(spec: ModelSpec) -> ModelNeed | None:
    """The memory that the engine of a model may take on this host, evenly for the places that it has; None where its
    operator gave none."""
    memory = settings_of(spec.engine).memory
    if memory is None:
        return None
    each = RankNeed(weights=-(-memory // spec.tp), kv=0, step=0, process=0)
    return ModelNeed(revision=spec.revision, context=spec.max_context or 0, ranks=[each] * spec.tp)


def named_settings(
    python: Mapping[str, str], command: Mapping[str, str], url: Mapping[str, str], memory: Mapping[str, int]
) -> dict[str, EngineSettings]:
    """Of the options --engine-python, --engine-command, --engine-url and --engine-memory, each by engine. Raises
    SettingsError."""
    settings: dict[str, EngineSettings] = {}
    for name in {*python, *command, *url, *memory}:
        if name not in ENGINES:
            raise SettingsError(f"engine {name!r} is unknown: use {', '.join(ENGINES)}")
        words: list[str] = []
        if name in python:
            if not ENGINES[name].module:
                title = ENGINES[name].title
                raise SettingsError(f"--engine-python {name}: {title} is no Python program; use --engine-command")
            words = [_program(python[name], f"--engine-python {name}"), "-m", ENGINES[name].module]
        if name in command:
            program, *arguments = shlex.split(command[name]) or [""]
            words = [_program(program, f"--engine-command {name}"), *arguments]
        settings[name] = EngineSettings(
            command=words, by_module=name in python, url=url.get(name, ""), memory=memory.get(name)
        )
    return settings


def _program(path: str, option: str) -> str:
    program = shutil.which(str(Path(path).expanduser()))
    if program is None:
        raise SettingsError(f"{option}={path}: there is no such program, or it may not be run")
    return str(Path(program).absolute())


def address_of(name: str, settings: EngineSettings, host_id: str, model: str, replica: str) -> Address:
    """The address at which the engine of a replica listens on this host, the same after each start. Raises OSError
    where its folder can't be made."""
    if settings.url:
        return Address(url=settings.url)
    digest = hashlib.blake2b(f"{host_id}\n{model}\n{replica}".encode(), digest_size=8)
    if not CLASSES[name].socket_option:
        return Address(url=f"http://127.0.0.1:{20_000 + int.from_bytes(digest.digest()[:2], 'big') % 10_000}")
    return Address(socket=str(_private_folder() / f"{digest.hexdigest()}.sock"))


def _private_folder() -> Path:
    """A folder for sockets, of this user alone; its path is short, as a socket's must be. Raises OSError."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    place = Path(base) / f"furrow-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    about = place.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise PermissionError(f"{place} belongs to another user, or others may enter it: remove it")
    return place


def log_file(model: str, replica: str) -> Path:
    """The log file of a replica's engine."""
    name = f"{model}-{replica}".replace("/", "--")
    return folder("engines") / f"{name}.log"


def last_lines(path: Path) -> str:
    """The end of an engine's log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    shown = [line.strip()[:300] for line in lines if line.strip() and not line.startswith((" ", "\t"))]
    return " | ".join(shown[-LAST_LINES:])


def engine_command(name: str, settings: EngineSettings, launch: Launch) -> list[str]:
    """The command of an engine's process."""
    return [*settings.command, *CLASSES[name].command(launch)]


def engine_environment(name: str, launch: Launch) -> dict[str, str]:
    """The variables of an engine's process: the worker's without its secrets, and the engine's own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_SECRET)}
    return environment | CLASSES[name].environment(launch)
