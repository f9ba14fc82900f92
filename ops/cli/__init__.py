"""The `furrow` command. Verbs are imported only when they are called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from control.errors import FurrowError

VERBS = {
    "serve": ("ops.cli.serve", "Serve one model on this machine: server, agent, ranks and API together."),
    "worker": ("ops.cli.parts", "Run this host's agent, which runs the ranks that the farm assigns to it."),
    "api": ("ops.cli.parts", "Run one HTTP API process."),
    "models": ("ops.cli.models", "Load, unload and list the models of the farm."),
    "drain": ("ops.cli.drain", "Empty a host, or replace one replica, without failing a request."),
    "keys": ("ops.cli.keys", "Create, limit, list and revoke API keys, and show what they used."),
    "dead": ("ops.cli.dead", "List, show, retry and drop requests that crashed their group."),
    "bench": ("ops.cli.parts", "Measure a farm under load and compare it with other engines."),
    "chaos": ("ops.cli.parts", "Strike a farm with faults under load and check every stream."),
    "demo": ("ops.cli.parts", "Serve the demonstration model with two ranks and ask it two questions."),
}
"""Verb → module that holds it as an attribute, and the line that --help shows without importing it."""


class LazyGroup(click.Group):
    """A group that knows its verbs by name and imports one only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        return getattr(importlib.import_module(VERBS[cmd_name][0]), cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="furrow")
def cli() -> None:
    """Furrow serves large language models on a farm of workers, with Redis as control plane."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script: a FurrowError becomes one clear line and exit status 1."""
    try:
        cli.main(args=list(arguments) if arguments is not None else None, prog_name="furrow", standalone_mode=True)
    except FurrowError as error:
        click.echo(f"furrow: {error}", err=True)
        sys.exit(1)
