"""`furrow dead`: requests that were given up, with their cause."""

from __future__ import annotations

import click

from control.cli.options import connect_to_farm, redis_option
from control.connection import read, run
from control.keys import ModelKeys
from control.streams import Entry


@click.group()
def dead() -> None:
    """Look at the dead letters."""


@dead.command(name="list")
@click.argument("model")
@redis_option
def list_dead(model: str, redis_url: str | None) -> None:
    """Show the dead letters of MODEL, newest first."""
    client = connect_to_farm(redis_url)
    letters: list[Entry] = run(client, read("XREVRANGE", ModelKeys(model).dead, "+", "-", parse=list))
    if not letters:
        click.echo(f"No dead letters of '{model}'.")
    for entry, fields in letters:
        click.echo(f"{entry}  {fields.get('rid', '?')}  {fields.get('cause', '')}")
