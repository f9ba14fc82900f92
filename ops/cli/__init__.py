"""The `furrow` command: its verbs, the output of each, and `furrow doctor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from control.errors import FurrowError
from control.process import remember_program
from ops.common.groups import LazyGroup

VERBS = {
    "run": ("ops.cli.run.command", "Talk to a model: of an API, of a farm, or of a private farm that ends with it."),
    "serve": ("ops.cli.serve", "Serve one model on this machine: server, agent, ranks and API together."),
    "pull": ("ops.cli.files", "Download a model, so that the first start does not wait for it."),
    "list": ("ops.cli.files:list_models", "List the downloaded models of this user, with their sizes."),
    "rm": ("ops.cli.files", "Delete downloaded models."),
    "service": ("ops.cli.service", "Run a part of Furrow as a service of this user, by systemd."),
    "worker": ("ops.cli.parts", "Run this host's agent, which runs the ranks that the farm assigns to the host."),
    "api": ("ops.cli.parts", "Run one HTTP API process."),
    "models": ("ops.cli.models", "Load, pause, unload and list the models of the farm."),
    "doctor": ("ops.cli.doctor.doctor", "Check Redis, hosts, models and the API, with a remedy for each finding."),
    "top": ("ops.cli.top", "Show models, replicas and ranks with their rates, once a second."),
    "ps": ("ops.cli.ps", "List what runs: replicas with memory, requests and time since they serve."),
    "show": ("ops.cli.show", "Show a model: its architecture, files and settings."),
    "hosts": ("ops.cli.hosts", "List the hosts of the farm."),
    "history": ("ops.cli.ps", "List the epochs and faults of a model's replicas."),
    "requests": ("ops.cli.requests", "List, show and cancel requests of all tenants."),
    "drain": ("ops.cli.hosts", "Empty a host, or replace one replica, without failing a request."),
    "keys": ("ops.cli.keys", "Create, limit, list and revoke API keys, and show their usage."),
    "dead": ("ops.cli.requests", "List, show, retry and drop requests that crashed their group."),
    "replay": ("ops.cli.requests", "Compute a request that was kept once more, and compare the tokens."),
    "cache": ("ops.cli.files", "List and clear what this host keeps to start faster."),
    "selftest": ("ops.cli.selftest", "Try every kernel of a device, and switch off what does not work."),
    "bench": ("ops.cli.parts", "Measure a farm under load and compare it with other engines."),
    "chaos": ("ops.cli.parts", "Inject faults into a farm under load and check every stream."),
    "demo": ("ops.cli.parts", "Serve the demonstration model with two ranks, and kill one during an answer."),
}


SECTIONS = {
    "Models": ("run", "serve", "models", "show", "pull", "list", "rm"),
    "A farm": ("worker", "api", "hosts", "drain", "keys"),
    "What goes on": ("ps", "top", "requests", "history", "doctor", "dead", "replay"),
    "This host": ("service", "cache", "selftest"),
    "Measure and try": ("bench", "chaos", "demo"),
}
EXAMPLES = """
\b
Examples:
  furrow run smollm2 "Why is the sky blue?"    one answer
  furrow serve ~/models/Qwen3-0.6B             an API at http://127.0.0.1:8000/v1
  furrow ps                                    what runs here
  furrow doctor                                what is wrong, and what mends it
"""


def _print_version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    """Instead of click's own option, which needs the version at each start: to read it takes 10 ms."""
    if value and not context.resilient_parsing:
        from control.version import VERSION

        click.echo(f"furrow, version {VERSION}")
        context.exit()


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    sections=SECTIONS,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Furrow serves large language models on a farm of workers, with Redis as control plane."""


def open_streams() -> None:
    """Open /dev/null where the caller closed standard input, output or error: another file would get its number, and
    what is written there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script: a FurrowError becomes one clear line and exit status 1."""
    open_streams()
    if arguments is None:
        remember_program()
    try:
        cli.main(args=list(arguments) if arguments is not None else None, prog_name="furrow", standalone_mode=True)
    except FurrowError as error:
        from ops.cli.tables import lines_of

        click.echo(lines_of(f"furrow: {error}"), err=True)
        sys.exit(1)
