"""Judges a furrow command line by the real parsers, without running it."""

from __future__ import annotations

import click

from api.__main__ import main as api_command
from ops.bench.__main__ import bench as bench_command

ELSEWHERE = {"api": api_command, "bench": bench_command}
"""Verbs whose options another module parses."""


def parse(command: click.Command, arguments: list[str]) -> list[str]:
    """The verbs of a command line, having parsed every option without running anything. Raises UsageError."""
    command = ELSEWHERE.get(command.name or "", command)
    context = command.make_context(command.name, list(arguments))
    if not isinstance(command, click.Group):
        return []
    name, verb, rest = command.resolve_command(context, arguments)
    assert name is not None
    assert verb is not None
    return [name, *parse(verb, rest)]
