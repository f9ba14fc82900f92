"""`furrow serve`: a whole farm on one machine, started and stopped by one parent process."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import click

from api.options import api_options, take_api_arguments
from control.errors import SettingsError
from control.listening import free_port, second_port
from control.messages import ModelSpec
from control.operations.local_farms import serve_folder
from control.operations.options import FIXED_KEYS_VARIABLE, asks_for_key, connect_to_farm, key_options, redis_option
from control.operations.spec import build_spec
from control.process import die_with_parent
from control.settings import REDIS_AWAITED, log_level, redis_reference
from ops.cli.options import (
    demo_environment,
    idle_option,
    memory_option,
    model_options,
)
from ops.cli.tables import echo_line
from ops.common.engine_options import ENGINE_OPTIONS, engine_environment, engine_options
from ops.common.groups import without_collections
from ops.demo import MODEL_DIR
from ops.local.embedded import EmbeddedServer
from ops.local.server_binary import server_bytes
from ops.local.supervisor import STOP_LIMIT_S, Part, Supervisor

SERVING_TICK_S = 0.25
"""While the model is served, when each look takes processor time from it."""
SHOWN_NAMES = 8
GRACE_S = 5.0
"""Seconds for open streams when the parent stops. A cut stream can be resumed after the next start."""


@click.command(short_help="Serve models on this machine.", context_settings={"default_map": {"grace": GRACE_S}})
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@click.option(
    "--models",
    "folders",
    metavar="DIR|*",
    multiple=True,
    help="Offer every model of a folder, or of the cache ('*'): each is loaded by its first request.",
)
@idle_option
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free port.")
@key_options
@redis_option
@click.option("--data", type=click.Path(file_okay=False), help="Folder of the private server [default: per port].")
@click.option(
    "--redis-memory",
    metavar="SIZE",
    help="Memory limit of the private server, such as 2GiB [default: a quarter of the machine's].",
)
@memory_option
@engine_options
@click.option("--verbose", is_flag=True, help="Print the logs of the processes; else warnings alone.")
@api_options
@click.pass_context
def serve(
    context: click.Context,
    models: tuple[str, ...],
    folders: tuple[str, ...],
    idle_s: int,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    keys: bool,
    no_auth: bool,
    redis_url: str | None,
    data: str | None,
    redis_memory: str | None,
    memory: str | None,
    verbose: bool,
    **options: Any,
) -> None:
    """Serve each MODEL (`demo`, a folder, or a Hugging Face repository) and print the URL once all are ready.

    With --models many models take turns in the memory of the machine. Each is loaded by its first request, and leaves
    when another one needs its room, or after --idle.

    Options of a model apply to each MODEL. Without --redis the command starts a private Redis-compatible server, which
    listens on loopback only.
    """
    if "FURROW_PARENT" in os.environ:
        die_with_parent()
    engines = engine_environment(**{name: options.pop(name) for name in ENGINE_OPTIONS})
    ollama_port: int | None = options["ollama_port"]
    arguments = take_api_arguments(context, options)
    if not models and not folders:
        raise click.UsageError("Missing MODEL: name one, or offer every model of a folder with --models DIR.")
    specs = build_specs(models, folders=folders, idle_s=idle_s, **options)
    asks = asks_for_key(host, api_keys, keys, no_auth)
    port = free_port(host, port)
    if ollama_port is not None:
        second_port(host, ollama_port, port)  # else the API process would end again and again
    stopping = Stopping()
    with ExitStack() as stack:
        redis, server = named_or_private(redis_url, data, port, redis_memory, stack)
        # By its folder: neither a command line nor the children's environment has the private server's password.
        redis_settings = {"FURROW_REDIS_URL": redis, REDIS_AWAITED: "1" if server is not None else "0"}
        limits = {"FURROW_MEMORY": memory, **engines} if memory else engines
        fixed = {FIXED_KEYS_VARIABLE: " ".join(api_keys)} if api_keys else {}
        level = log_level("info" if verbose else "warning")
        logged = {"FURROW_LOG_LEVEL": level}
        supervisor = Supervisor({**redis_settings, **fixed, **limits, **logged, **demo_environment()}, say)
        listening = ["--host", host, "--port", str(port), "--keys" if asks else "--no-auth"]
        patience = STOP_LIMIT_S + context.params["grace"]
        worker = Part("worker", "worker.agent.supervision", [])
        api = Part("api", "api", [*listening, *arguments], stop_limit_s=patience)
        stack.callback(supervisor.stop, stopping.hurry)
        if server is None:
            from ops.cli.serving import desire, reminder_of_keys, wait_until_served

            client = connect_to_farm(redis)
            desire(client, specs, alone=False)
            supervisor.start(worker)
            supervisor.start(api)
        else:
            supervisor.start(worker)
            supervisor.start(api)
            with without_collections():  # beside the start of those
                from control import logs
                from ops.cli.serving import desire, reminder_of_keys, wait_until_served

            logs.configure(level=level)
            say(f"starting {in_words([spec.name for spec in specs])} on this machine, with the data in {redis}")
            server.wait_until_ready()
            client = connect_to_farm(server.url)
            desire(client, specs, alone=True)
            server.publish()  # not before: the agent would start what earlier runs served
        if asks and not api_keys:
            say(reminder_of_keys(client, host, None if server is None else Path(redis)))
        wait_until_served(client, specs, (host, port), supervisor.tend, lambda: bool(stopping))
        if not stopping:
            names = in_words([spec.name for spec in specs])
            verb = "is" if len(specs) == 1 else "are"
            url = f"http://{host}:{port}"
            second = f", Ollama's clients at http://{host}:{ollama_port}" if ollama_port is not None else ""
            click.echo(f"{names} {verb} served at {url}/v1, the console at {url}/console/{second} (Ctrl-C stops)")
        while not stopping:
            supervisor.tend()
            time.sleep(SERVING_TICK_S)
        say("stopping (Ctrl-C again kills)")


def build_specs(
    models: Sequence[str], *, name: str | None, folders: Sequence[str] = (), idle_s: int = 600, **options: Any
) -> list[ModelSpec]:
    """The desired state of each model, and of each one in `folders`, on demand. Raises SettingsError for a folder
    without any, for an option of one model where there are several, and where two would have one name."""
    if name is not None and len(models) > 1:
        raise SettingsError("--name is for one model; several are served under their own names")
    specs = [build_spec(model, name=name, demo=MODEL_DIR, **options) for model in models]
    if folders:
        from worker.repository.local_models import local_models  # only here: it makes the start of other models slower

        if name is not None or options.get("gguf") is not None:
            raise SettingsError("--name and --gguf are for one model; --models offers each under its own name")
        options.pop("gguf", None)
        specs += [
            build_spec(entry.source, name=entry.name, gguf=entry.gguf, replicas="0..1", idle_s=idle_s, **options)
            for folder in folders
            for entry in local_models(folder)
        ]
    names = [spec.name for spec in specs]
    if twice := sorted({model_name for model_name in names if names.count(model_name) > 1}):
        raise SettingsError(f"two models would have the name '{twice[0]}'; serve one of them alone with --name")
    return specs


def in_words(names: Sequence[str]) -> str:
    """The names of all models, or the first of many and their number."""
    if len(names) > SHOWN_NAMES:
        return f"{', '.join(names[:SHOWN_NAMES])} and {len(names) - SHOWN_NAMES} more"
    return " and ".join(names)


def named_or_private(
    redis: str | None, data: str | None, port: int, memory: str | None, stack: ExitStack
) -> tuple[str, EmbeddedServer | None]:
    """The Redis to use, as a URL or a path; and the private server, which is starting on that path, if none is
    named."""
    redis = redis or os.environ.get("FURROW_REDIS_URL") or os.environ.get("REDIS_URL")
    if redis and memory:
        raise SettingsError("--redis-memory is for the private server; a Redis that you name has its own maxmemory")
    if redis:
        return redis_reference(redis), None
    size = server_bytes(memory)
    folder = data_folder(data, port, stack).resolve()
    server = EmbeddedServer(folder, memory=size)
    stack.callback(server.stop)
    server.begin()
    return str(folder), server


class Stopping:
    """True once SIGINT or SIGTERM came; a second signal shortens the stop."""

    def __init__(self) -> None:
        self._signals = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1

    def __bool__(self) -> bool:
        return self._signals > 0

    def hurry(self) -> bool:
        """True if the stop must not wait for an orderly end any more."""
        return self._signals > 1


def say(line: str) -> None:
    """Print progress on standard error, as the logs of the parts do; standard output has only the URL."""
    echo_line(f"furrow: {line}", err=True)


def data_folder(data: str | None, port: int, stack: ExitStack) -> Path:
    """The data folder of the private server: requests survive a restart on the same port."""
    if data is not None:
        return Path(data)
    folder = serve_folder(port)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="furrow-")))
    return folder
