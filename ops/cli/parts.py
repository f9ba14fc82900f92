"""Verbs that replace this process by another part of Furrow."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import click

from control.operations.options import redis_option
from control.process import python_command
from control.settings import redis_reference
from ops.cli.options import demo_environment, memory_option
from ops.common.engine_options import engine_environment, engine_options

PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "help_option_names": []}


def become(module: str, *arguments: str, **environment: str) -> NoReturn:
    """Replace this process by `python -m module`, which then gets the signals and sets the exit status."""
    sys.stdout.flush()
    command = python_command(module, *arguments)
    os.execve(command[0], command, {**os.environ, **environment})


@click.command(short_help="Run this host's agent.")
@redis_option
@click.option("--host-id", help="This host's name in the farm [default: the machine's name].")
@click.option("--address", help="Address for other hosts [default: the local address of the connection to Redis].")
@click.option(
    "--metrics",
    metavar="HOST:PORT|off",
    help="Address of /metrics and /health of this host's ranks [default: 127.0.0.1:9464, or a free port].",
)
@memory_option
@engine_options
@click.option("--agent", is_flag=True, hidden=True, help="Become the agent: for the supervisor, which calls it.")
def worker(
    redis_url: str | None,
    host_id: str | None,
    address: str | None,
    metrics: str | None,
    memory: str | None,
    agent: bool,
    **engines: tuple[str, ...],
) -> None:
    """Run this host's agent, which starts and watches the ranks that the farm assigns to the host.

    SIGTERM ends the ranks in order. SIGUSR2 replaces the agent, by what the command leads to then, while the ranks
    continue.
    """
    if agent:
        become("worker", "agent")
    redis = redis_reference(redis_url) if redis_url else None
    options = {
        "FURROW_REDIS_URL": redis,
        "FURROW_HOST_ID": host_id,
        "FURROW_ADDRESS": address,
        "FURROW_METRICS": metrics,
        "FURROW_MEMORY": memory,
    }
    environment = {name: value for name, value in options.items() if value}
    become("worker.agent.supervision", **environment, **engine_environment(**engines))


@click.command(context_settings=PASS_ON, short_help="Run one HTTP API process.")
@redis_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def api(redis_url: str | None, arguments: tuple[str, ...]) -> None:
    """Run one HTTP API process; `furrow api --help` lists its options."""
    environment = {"FURROW_REDIS_URL": redis_reference(redis_url)} if redis_url else {}
    become("api", *arguments, **environment, **demo_environment())


@click.command(context_settings=PASS_ON, short_help="Run a benchmark.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Measure a farm; `furrow bench --help` lists the benchmarks."""
    become("ops.bench", *arguments)


@click.command(context_settings=PASS_ON, short_help="Show a rank that dies under a stream.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def demo(arguments: tuple[str, ...]) -> None:
    """Serve the demonstration model with two ranks, and kill one during an answer."""
    become("ops.cli.demo", *arguments)


@click.command(context_settings=PASS_ON, short_help="Inject faults into a farm and check every stream.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def chaos(arguments: tuple[str, ...]) -> None:
    """Inject faults into a private farm under streaming load; `furrow chaos --help` lists them."""
    become("ops.chaos", *arguments)
