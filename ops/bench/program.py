"""The start of a benchmark as a program."""

from __future__ import annotations

import sys

import click

from control import logs
from control.errors import FurrowError


def run(command: click.Command, name: str | None = None) -> None:
    """Run a command with this process's arguments; a FurrowError becomes one line and exit status 1."""
    logs.configure("auto", "warning")
    try:
        command.main(prog_name=name)
    except FurrowError as error:
        click.echo(f"{name or command.name}: {error}", err=True)
        sys.exit(1)
