"""`furrow serve`: a whole farm on one machine, started and stopped by one parent process."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import click

from control import access
from control.errors import ModelUnavailable, SettingsError
from control.listening import free_port
from control.messages import ModelSpec
from control.operations.options import connect_to_farm, cors_option, quota_options, redis_option
from control.operations.spec import build_spec
from control.placement import farm
from control.process import die_with_parent
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas import health
from control.requests.upkeep.abandon import abandon
from control.settings import redis_reference
from ops.cli.options import demo_environment, model_options
from ops.demo import MODEL_DIR
from ops.local.embedded import EmbeddedServer
from ops.local.memory import server_bytes
from ops.local.ready import is_ready
from ops.local.supervisor import Part, Supervisor

TICK_S = 0.1
_PERCENT = re.compile(r"(\d+) %")
GRACE_S = "5"
"""Seconds for open streams when the parent stops. A stream that is cut can be resumed after the next start."""


@click.command(short_help="Serve one model on this machine.")
@click.argument("model")
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: a free port.")
@access.key_options
@cors_option
@quota_options
@redis_option
@click.option("--data", type=click.Path(file_okay=False), help="Folder of the private server [default: per port].")
@click.option(
    "--redis-memory",
    metavar="SIZE",
    help="Memory limit of the private server, such as 2GiB [default: a quarter of the machine's].",
)
def serve(
    model: str,
    host: str,
    port: int,
    api_keys: tuple[str, ...],
    keys: bool,
    no_auth: bool,
    cors_origins: tuple[str, ...],
    redis_url: str | None,
    data: str | None,
    redis_memory: str | None,
    response_bytes: int | None,
    response_number: int,
    **options: Any,
) -> None:
    """Serve MODEL (`demo`, a folder, or a Hugging Face repository) and print the URL once it is ready.

    Without --redis the command starts a private Redis-compatible server, which listens on loopback only.
    """
    if "FURROW_PARENT" in os.environ:
        die_with_parent()
    spec = build_spec(model, demo=MODEL_DIR, **options)
    asks = access.asks_for_key(host, api_keys, keys, no_auth)
    port = free_port(host, port)
    stopping = Stopping()
    with ExitStack() as stack:
        redis, folder = named_or_private(redis_url, data, port, redis_memory, stack)
        client = connect_to_farm(redis)
        desire(client, spec, alone=folder is not None)
        fixed = {access.FIXED_KEYS_VARIABLE: " ".join(api_keys)} if api_keys else {}
        supervisor = Supervisor({"FURROW_REDIS_URL": redis, **fixed, **demo_environment()}, say)
        stack.callback(supervisor.stop, stopping.hurry)
        supervisor.start(Part("worker", "worker.supervision", []))
        listening = ["--host", host, "--port", str(port), "--grace", GRACE_S]
        listening += [word for origin in cors_origins for word in ("--cors-origin", origin)]
        listening += ["--response-number", str(response_number)]
        listening += ["--response-bytes", str(response_bytes)] if response_bytes else []
        supervisor.start(Part("api", "api", [*listening, "--keys" if asks else "--no-auth"]))
        if asks and not api_keys:
            remind_of_keys(client, host, folder)
        wait_until_served(client, spec, (host, port), supervisor, stopping)
        if not stopping:
            click.echo(f"{spec.name} is served at http://{host}:{port}/v1 (Ctrl-C stops)")
        while not stopping:
            supervisor.tend()
            time.sleep(TICK_S)
        say("stopping (Ctrl-C again kills)")


def named_or_private(
    named: str | None, data: str | None, port: int, memory: str | None, stack: ExitStack
) -> tuple[str, Path | None]:
    """The Redis to use, as a URL or a path; and the data folder of the private server, if none is named."""
    named = named or os.environ.get("FURROW_REDIS_URL") or os.environ.get("REDIS_URL")
    if named and memory:
        raise SettingsError("--redis-memory is for the private server; a Redis that you name has its own maxmemory")
    if named:
        return redis_reference(named), None
    size = server_bytes(memory)
    folder = data_folder(data, port, stack).resolve()
    stack.enter_context(EmbeddedServer(folder, memory=size))
    # By its folder, so that neither a command line nor the children's environment has the private server's password.
    return str(folder), folder


def remind_of_keys(client: SyncRedis, host: str, folder: Path | None) -> None:
    """Print how to make the key that clients need; `folder` is the private server's."""
    where = f" --redis {shlex.quote(str(folder))}" if folder is not None else ""
    say(access.why_asked(host, run(client, access.count()), where))


class Stopping:
    """True once SIGINT or SIGTERM came; a second one asks to hurry."""

    def __init__(self) -> None:
        self._signals = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signals += 1

    def __bool__(self) -> bool:
        return self._signals > 0

    def hurry(self) -> bool:
        """True if the wait for an orderly end is over."""
        return self._signals > 1


def say(line: str) -> None:
    """Print progress on standard error, as the logs of the parts do; standard output has only the URL."""
    click.echo(f"furrow: {line}", err=True)


class News:
    """Prints changes. On a terminal percentages count up in place; a log gets a line for every quarter."""

    def __init__(self) -> None:
        self._last = ""

    def tell(self, line: str) -> None:
        before, self._last = self._last, line
        if line == before:
            return
        counts = _PERCENT.sub("", line) == _PERCENT.sub("", before) != line
        if sys.stderr.isatty():
            # Overwrite the line above if only its number changed.
            click.echo("\033[A\033[2K" if counts else "", nl=False, err=True)
        elif counts and _quarter(line) == _quarter(before):
            return
        say(line)


def _quarter(line: str) -> int:
    found = _PERCENT.search(line)
    return int(found[1]) // 25 if found else -1


def data_folder(data: str | None, port: int, stack: ExitStack) -> Path:
    """The data folder of the private server: requests survive a restart on the same port."""
    if data is not None:
        return Path(data)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "furrow" / f"serve-{port}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="furrow-")))
    return folder


def desire(client: SyncRedis, spec: ModelSpec, alone: bool) -> None:
    """Make `spec` the desired state; on a private server it replaces all models of earlier runs."""
    if alone:
        for other in catalog.list_specs(client):
            if other.name != spec.name:
                abandon(client, other.name, f"the model '{other.name}' is not served any more")
                catalog.forget(client, other)
        # An assignment left behind would start its ranks again, and they would bring their specification back.
        for host in farm.known_hosts(client):
            for assignment in farm.assignments(client, host):
                if assignment.spec.name != spec.name:
                    farm.remove_assignment(client, host, assignment.spec.name, assignment.replica)
        for replica in [*run(client, catalog.replicas(spec.name)), *(f"r{index}" for index in range(spec.replicas))]:
            health.clear_status(client, spec.name, replica)
    catalog.put_spec(client, spec)


def wait_until_served(
    client: SyncRedis, spec: ModelSpec, address: tuple[str, int], supervisor: Supervisor, stopping: Stopping
) -> None:
    """Print the progress until /ready is true. Raises ModelUnavailable if the model can't be served."""
    news = News()
    while not stopping:
        supervisor.tend()
        overview = health.overview(client, spec.name)
        news.tell(f"{spec.name}: {overview.state}" + (f" ({overview.detail})" if overview.detail else ""))
        if overview.state == "failed":
            raise ModelUnavailable(spec.name, "failed", overview.detail)
        if overview.state == "loaded" and is_ready(address):
            return
        time.sleep(TICK_S)
