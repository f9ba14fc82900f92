"""`furrow models`: what the farm should run, and what it runs."""

from __future__ import annotations

from typing import Any

import click

from control import catalog, health
from control.cli.options import build_spec, connect_to_farm, model_options, redis_option
from control.errors import ModelNotFound, SettingsError


@click.group()
def models() -> None:
    """Load, unload and list the models of the farm."""


@models.command()
@click.argument("model")
@model_options
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Copies that share the queue.")
@click.option("--spread", is_flag=True, help="Ranks on as many hosts as there are, instead of on one that has room.")
@click.option("--if-needed", is_flag=True, help="Succeed where MODEL is loaded already with these settings.")
@redis_option
def load(model: str, redis_url: str | None, if_needed: bool, **options: Any) -> None:
    """Make MODEL (`demo`, a folder or a Hugging Face repository) part of the farm's desired state."""
    spec = build_spec(model, **options)
    client = connect_to_farm(redis_url)
    known = catalog.get_spec(client, spec.name)
    if known is not None and known.unload:
        raise SettingsError(
            f"model '{spec.name}' is being unloaded; wait until `furrow models list` no longer shows it"
        )
    failed = health.overview(client, spec.name).state == "failed"
    if known is not None and catalog.same(known, spec) and not failed:
        if if_needed:
            click.echo(f"{spec.name}: already desired with these settings.")
            return
        raise SettingsError(f"model '{spec.name}' is already loaded with these settings; nothing was changed")
    catalog.put_spec(client, spec, again=failed)
    click.echo(f"{spec.name}: desired. `furrow models list` shows when it is loaded.")


@models.command()
@click.argument("name")
@redis_option
def unload(name: str, redis_url: str | None) -> None:
    """Take the model NAME out of the farm: requests that run are finished first."""
    client = connect_to_farm(redis_url)
    if not catalog.tombstone(client, name):
        raise ModelNotFound(name, [spec.name for spec in catalog.list_specs(client)])
    click.echo(f"{name}: unloading.")


@models.command(name="list")
@redis_option
def list_models(redis_url: str | None) -> None:
    """Show every model with its replicas: state, host, devices, epoch, last step, and what is wrong."""
    client = connect_to_farm(redis_url)
    rows = [("MODEL", "REPLICA", "STATE", "HOST", "DEVICES", "EPOCH", "STEP", "QUEUED", "DETAIL")]
    for overview in health.overviews(client):
        for replica in overview.replicas:
            rows.append(
                (
                    overview.model,
                    replica.replica,
                    replica.state,
                    replica.host or "-",
                    ",".join(replica.devices) or "-",
                    str(replica.epoch or "-"),
                    str(replica.seq),
                    str(overview.queued),
                    replica.detail,
                )
            )
    if len(rows) == 1:
        click.echo("No models. Load one with `furrow models load MODEL`.")
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
